"""The compiled programs of `generate`: the prefill, and the loop that chooses one token per step.

A program closes over the graphdef and accepts flat leaves: as a static argument the graphdef would
be hashed on every call. Another bucket of lengths compiles another program, and so does another
structure of the `TokenChoice`, of the loop alone; its numbers are arguments.

Legend: b rows, w bucket of prompt lengths, t room for prompt and new tokens, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from ed_layers import native
from ed_layers.cache.protocol import ContiguousCache
from ed_layers.sums import logsumexp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.token_choice import Candidates, TokenChoice, process
from ed_models.protocol import LanguageModel

CacheLeaves = list[jax.Array]
Kept = dict[str, jax.Array]
_CacheT = TypeVar("_CacheT", bound=ContiguousCache)


@dataclass(frozen=True)
class Split:
    """The static half of a model. The mesh is part of it because the module reads it from its
    config."""

    graphdef: nnx.GraphDef
    structure: Any  # a PyTreeDef, which type checkers consider a variable
    mesh: jax.sharding.Mesh

    @classmethod
    def of(cls, model: nnx.Module, mesh: jax.sharding.Mesh) -> tuple[Split, CacheLeaves]:
        """Split a model into its static half and its leaves."""
        graphdef, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        return cls(graphdef, structure, mesh), leaves

    def merge(self, leaves: CacheLeaves) -> LanguageModel:
        """Return the model with these leaves."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, leaves))


class Draws(NamedTuple):
    """The values that determine the draws of rows.

    Attributes:
        keys: random key of each row; None for greedy decoding.
        lengths: number of prompt tokens of each row.
    """

    keys: Key[Array, " b"] | None
    lengths: Int[Array, " b"]

    def choose(
        self, candidates: Candidates, choice: TokenChoice, rows: GeneratedRows
    ) -> Int[Array, " b"]:
        """Choose the next token of each row."""
        return candidates.choose(choice, self.keys, self.lengths + rows.new)


@functools.lru_cache(maxsize=8)
def prefill_program(split: Split) -> Callable[..., tuple[ContiguousCache, jax.Array]]:
    """`(leaves, tokens [b, w], valid [b, w], inputs, capacity=) -> (cache, logits [b, v])`."""

    @functools.partial(jax.jit, static_argnames="capacity")
    def prefill(leaves, tokens, valid, inputs, *, capacity):
        model = split.merge(leaves)
        b, s = tokens.shape
        arguments = model.prepare_inputs_for_generation(
            tokens, capacity, attention_mask=valid, inputs=inputs
        )
        arguments.pop("position_ids", None)  # the cache counts them as well
        out = model.decode(tokens, **arguments, logits_at=jnp.arange(b) * s + s - 1)
        return out.past_key_values, out.logits

    return prefill


@functools.partial(jax.jit, static_argnames="copies")
def repeat_rows(
    cache: _CacheT, logits: Float[Array, "b v"], *, copies: int
) -> tuple[_CacheT, Float[Array, "n v"]]:
    """Repeat each row `copies` times; the copies of a row are consecutive."""
    rows = jnp.repeat(jnp.arange(logits.shape[0]), copies)
    return cache.select_rows(rows), logits[rows]


@functools.partial(jax.jit, static_argnames=("rows", "copies"))
def draw_keys(seed: jax.Array, *, rows: int, copies: int) -> Key[Array, " n"]:
    """Return a key for each copy of each row. The first copy has the key of the row, so its draws
    equal those of a row without copies."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    # Positions are folded in later, and are smaller.
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
        keys, jnp.uint32(2**31) + jnp.arange(copies, dtype=jnp.uint32)
    )
    first = (jnp.arange(copies) == 0)[None]
    return jnp.where(first, keys[:, None], folded).reshape(-1)


def collect_step_values(
    outputs: frozenset[str],
    logits: jax.Array,
    scores: jax.Array,
) -> Kept:
    """Return the logits and scores [b, v] of a step that are recorded."""
    logits = logits.astype(jnp.float32)
    return {name: x for name, x in (("logits", logits), ("scores", scores)) if name in outputs}


def _compute_logprobs(scores: Float[Array, "b v"], tokens: Int[Array, " b"]) -> Float[Array, " b"]:
    """Return the log-probabilities of tokens."""
    scores = scores.astype(jnp.float32)
    return jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0] - logsumexp(scores)


def empty(step_values: Kept, steps: int) -> Kept:
    """Return zeros for the values kept of `steps` steps; the first axis is the step."""
    return {name: jnp.zeros((steps, *x.shape), x.dtype) for name, x in step_values.items()}


def record(records: Kept, n: jax.Array | int, step: Kept) -> Kept:
    """Write the values of step `n`."""
    return {name: records[name].at[n].set(x) for name, x in step.items()}


class Finished(NamedTuple):
    """The result of a decoding loop.

    Attributes:
        ids: prompt and new tokens, [b, t]; see `GeneratedRows`.
        new: number of new tokens of the longest row.
        steps: number of forward passes after the prefill.
        records: the requested values of each step; the first axis is the step.
    """

    ids: Int[Array, "b t"]
    new: Int[Array, ""]
    steps: Int[Array, ""]
    records: Kept


@functools.lru_cache(maxsize=8)
def token_program(split: Split) -> Callable[..., tuple[Finished, ContiguousCache]]:
    """`(leaves, cache, logits, rows, draws, choice, pad, room=, outputs=) -> (Finished, cache)`.

    The cache is returned only so that the compiler reuses its donated memory.
    """

    @functools.partial(jax.jit, static_argnames=("room", "outputs"), donate_argnames="cache")
    def decode(leaves, cache, logits, rows, draws, choice, pad, *, room, outputs):
        model = split.merge(leaves)
        b = logits.shape[0]

        def choose(
            logits: jax.Array, rows: GeneratedRows, done: Bool[Array, " b"]
        ) -> tuple[GeneratedRows, Bool[Array, " b"], Kept]:
            candidates = process(logits, choice, rows)
            token = jnp.where(done, pad, draws.choose(candidates, choice, rows))
            scores = of = candidates.spread()
            if "raw_logprobs" in outputs:
                of = logits
            elif "constrained_logprobs" in outputs:
                of = process(logits, choice.without_draw(), rows).spread()
            step_values = collect_step_values(outputs, logits, scores)
            if "logprobs" in outputs:
                if "raw_logprobs" not in outputs:  # as in the engine
                    of = of - jnp.max(of, axis=-1, keepdims=True)
                with native.chosen_by(model.config):
                    step_values["logprobs"] = jnp.where(done, 0.0, _compute_logprobs(of, token))
            rows = rows.push(token)
            return rows, done | rows.find_ended_rows(), step_values

        def has_unfinished_rows(state):
            n, _, done, _, _ = state
            return (n < rows.limit) & ~jnp.all(done)

        def step(state):
            n, rows, done, records, cache = state
            out = model.decode(rows.ids[:, -1:], past_key_values=cache, logits_at=jnp.arange(b))
            assert out.logits is not None
            rows, done, now = choose(out.logits, rows, done)
            return n + 1, rows, done, record(records, n, now), out.past_key_values

        rows, done, now = choose(logits, rows, jnp.zeros((b,), bool))
        start = (jnp.int32(1), rows, done, record(empty(now, room), 0, now), cache)
        n, rows, _, records, cache = jax.lax.while_loop(has_unfinished_rows, step, start)
        return Finished(rows.ids, n, n - 1, records), cache

    return decode
