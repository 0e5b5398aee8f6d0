"""Beam search: the likeliest continuations as wholes, as `transformers` searches them.

Each row has `k` running beams, and keeps the `k` best that have ended. A step looks at the `K`
likeliest ways to continue any of the row's running beams by a token: enough that `k` of them do not
end. Source: `transformers/generation/utils.py`, `_beam_search`; groups: Vijayakumar et al., 2016.

Legend: b rows, k beams of a group, G groups, K continuations, n new tokens, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ed_layers.cache.protocol import ContiguousCache
from jaxtyping import Array, Bool, Float, Int, Key

from ed_models.generation.decoding import Kept, Split, collect_step_values, empty, record
from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.settings import Beams
from ed_models.generation.token_choice import TokenChoice, process

_NEVER = -1e9  # as transformers has it; -inf would make NaN of differences


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """Beams of a group.

    Attributes:
        scores: of running beams the sum of log-probabilities, of ended ones that sum over a power
            of their length; [b, k].
        tokens: new tokens, [b, k, n].
        parents: for each new token the beam that it continued, counted over all rows and groups;
            -1 where there is no token. [b, k, n]
    """

    scores: Float[Array, "b k"]
    tokens: Int[Array, "b k n"]
    parents: Int[Array, "b k n"]

    @classmethod
    def blank(cls, b: int, k: int, n: int, pad: Int[Array, ""]) -> Sequences:
        """No beam at all."""
        none = jnp.full((b, k), _NEVER, jnp.float32)
        return cls(none, jnp.full((b, k, n), pad, jnp.int32), jnp.full((b, k, n), -1, jnp.int32))

    def take(self, index: Int[Array, "b j"]) -> Sequences:
        """Some of each row's beams."""
        return jax.tree.map(lambda x: _take(x, index), self)

    def concat_beams(self, extra_beams: Sequences) -> Sequences:
        """These beams and others of the same rows."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, extra_beams)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Group:
    """The search of one group.

    Attributes:
        running, ended: its beams.
        has_ended: which of `ended` are beams, [b, k].
        hopeful: rows in which a running beam may still beat an ended one, [b].
        going: whether the group continues.
    """

    running: Sequences
    ended: Sequences
    has_ended: Bool[Array, "b k"]
    hopeful: Bool[Array, " b"]
    going: Bool[Array, ""]

    @classmethod
    def start(cls, b: int, k: int, n: int, pad: Int[Array, ""]) -> Group:
        """All beams are the prompt; only the first counts, or they would stay the same."""
        blank = Sequences.blank(b, k, n, pad)
        first = replace(blank, scores=blank.scores.at[:, 0].set(0.0))
        rows = jnp.ones((b,), bool)
        return cls(first, blank, jnp.zeros((b, k), bool), rows, jnp.asarray(True))


class BeamStep(NamedTuple):
    """The arguments of a step besides the group.

    Attributes:
        n: new tokens so far.
        first: number of the group's first beam among a row's.
        keys: of each row; None where nothing is drawn.
    """

    n: Int[Array, ""] | int
    first: int
    keys: Key[Array, " b"] | None


def advance(
    group: Group,
    rows: GeneratedRows,
    logprobs: Float[Array, "b k v"],
    step: BeamStep,
    beams: Beams,
    choice: TokenChoice,
) -> tuple[Group, Int[Array, "b k"], Int[Array, "b k"]]:
    """Continue each beam of a group by a token.

    Args:
        rows: of the group's beams, [b * k].

    Returns:
        the group; and for each of its new running beams the beam of the group that it continues,
        and its token.
    """
    b, k, v = logprobs.shape
    count = max(2, 1 + rows.eos.shape[0]) * k
    total = (logprobs + group.running.scores[:, :, None]).reshape(b, k * v)
    if choice.do_sample:
        assert step.keys is not None, "drawing needs a key for each row"
        # The largest sums with Gumbel noise are draws without replacement.
        keys = jax.vmap(jax.random.fold_in, (0, None))(step.keys, step.n)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (k * v,)))(keys)
        _, index = jax.lax.top_k(total + noise, count)
        scores = jnp.take_along_axis(total, index, axis=1)
    else:
        scores, index = jax.lax.top_k(total, count)
    beam, token = index // v, (index % v).astype(jnp.int32)
    row_index = jnp.arange(b, dtype=jnp.int32)[:, None]
    parent = row_index * beams.size + step.first + beam.astype(jnp.int32)
    longer = replace(group.running.take(beam), scores=scores)
    longer = replace(
        longer,
        tokens=longer.tokens.at[:, :, step.n].set(token),
        parents=longer.parents.at[:, :, step.n].set(parent),
    )
    ends = rows.take((row_index * k + beam).reshape(-1)).push(token.reshape(-1)).find_ended_rows()
    ends = ends.reshape(b, count) | (step.n + 1 >= rows.limit)

    running = jnp.where(ends, scores + _NEVER, scores)
    best, kept_index = jax.lax.top_k(running, k)
    group = replace(
        _with_ended(group, longer, ends, step.n, beams),
        running=replace(longer.take(kept_index), scores=best),
    )
    group = _with_hope(group, ends, step.n + 1, rows.limit, beams)
    return group, _take(beam, kept_index), _take(token, kept_index)


def _with_ended(
    group: Group, longer: Sequences, ends: jax.Array, n: jax.Array | int, beams: Beams
) -> Group:
    """Keep the best ended rows: of earlier steps, and of the `k` likeliest rows of this step."""
    k = group.has_ended.shape[1]
    now = ends & (jnp.arange(ends.shape[1]) < k)
    full = jnp.all(group.has_ended, axis=1) if beams.early_stopping is True else False
    closed = (full | ~group.hopeful)[:, None]
    length = jnp.asarray(n + 1, jnp.float32)
    scores = longer.scores / length**beams.length_penalty
    scores = scores + closed * _NEVER + ~now * _NEVER
    every = group.ended.concat_beams(replace(longer, scores=scores))
    has_ended = jnp.concatenate([group.has_ended, now], axis=1)
    _, best = jax.lax.top_k(every.scores, k)
    return replace(group, ended=every.take(best), has_ended=_take(has_ended, best))


def _with_hope(
    group: Group, ends: jax.Array, length: jax.Array | int, limit: jax.Array | int, beams: Beams
) -> Group:
    """Whether it is worth going on."""
    reach = jnp.asarray(length, jnp.float32)
    if beams.early_stopping == "never":
        reach = jnp.where(beams.length_penalty > 0, jnp.asarray(limit, jnp.float32), reach)
    possible = group.running.scores[:, 0] / reach**beams.length_penalty
    worst = jnp.min(group.ended.scores, axis=1, keepdims=True)
    worst = jnp.where(group.has_ended, worst, _NEVER)
    hopeful = group.hopeful & jnp.any(possible[:, None] > worst, axis=1)
    going = jnp.any(hopeful) & ~jnp.all(ends)
    if beams.early_stopping is True:
        going &= ~jnp.all(group.has_ended)
    return replace(group, hopeful=hopeful, going=going)


def _take(x: jax.Array, index: Int[Array, "b j"]) -> jax.Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


class Found(NamedTuple):
    """The result of a search: the best beams of each row, [b, k, ...]; `steps`, `records` as in
    `Finished`, for all beams."""

    best: Sequences
    steps: Int[Array, ""]
    records: Kept


@functools.lru_cache(maxsize=8)
def beam_program(split: Split) -> Callable[..., tuple[Found, ContiguousCache]]:
    """`(leaves, cache, logits, rows, draws, choice, beams, pad, room=, outputs=)` to `(Found,
    cache)`, over `b * G * k` rows in which the beams of a row are contiguous."""

    @functools.partial(jax.jit, static_argnames=("room", "outputs"), donate_argnames="cache")
    def search(leaves, cache, logits, rows, draws, choice, beams, pad, *, room, outputs):
        model = split.merge(leaves)
        b, k = logits.shape[0] // beams.size, beams.size // beams.groups
        keys = None if draws.keys is None else draws.keys[:: beams.size]
        at_least = 1 + rows.eos.shape[0]

        def select(n, logits, rows, groups):
            """Continue all beams by a token: rows, groups, parents, and the recorded values."""
            logprobs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(b, beams.size, -1)
            beam = jnp.arange(b * beams.size, dtype=jnp.int32).reshape(b, beams.size)
            said = jnp.zeros((b, logprobs.shape[-1]))
            new_groups, sources, tokens, scores = [], [], [], []
            for i, group in enumerate(groups):
                mine = slice(i * k, (i + 1) * k)
                group_rows = rows.take(beam[:, mine].reshape(-1))
                diverse = logprobs[:, mine] - beams.diversity_penalty * said[:, None]
                candidates = process(
                    diverse.reshape(b * k, -1), choice, group_rows, at_least=at_least
                )
                scores.append(candidates.spread().reshape(b, k, -1))
                step = BeamStep(n, i * k, keys)
                group, source, token = advance(group, group_rows, scores[-1], step, beams, choice)
                said = said.at[jnp.arange(b)[:, None], token].add(1.0)
                new_groups.append(group)
                sources.append(_take(beam[:, mine], source))
                tokens.append(token)
            step_values = collect_step_values(
                outputs, logits, jnp.concatenate(scores, axis=1).reshape(logits.shape)
            )
            source = jnp.concatenate(sources, axis=1).reshape(-1)
            token = jnp.concatenate(tokens, axis=1).reshape(-1)
            return rows.take(source).push(token), tuple(new_groups), source, step_values

        def has_unfinished_groups(state):
            return jnp.any(jnp.stack([group.going for group in state[2]]))

        def advance_all(state):
            n, rows, groups, source, records, cache = state
            cache = cache.select_rows(source)
            at = jnp.arange(b * beams.size)
            out = model.decode(rows.ids[:, -1:], past_key_values=cache, logits_at=at)
            rows, groups, source, now = select(n, out.logits, rows, groups)
            return n + 1, rows, groups, source, record(records, n, now), out.past_key_values

        groups = tuple(Group.start(b, k, room, pad) for _ in range(beams.groups))
        rows, groups, source, now = select(0, logits, rows, groups)
        start = (jnp.int32(1), rows, groups, source, record(empty(now, room), 0, now), cache)
        n, _, groups, _, records, cache = jax.lax.while_loop(
            has_unfinished_groups, advance_all, start
        )
        best = functools.reduce(Sequences.concat_beams, [group.ended for group in groups])
        if beams.groups > 1:
            best = best.take(jax.lax.top_k(best.scores, beams.size)[1])
        return Found(best, n - 1, records), cache

    return search
