"""Choose the next token: the likeliest, or one that is drawn.

The draw for a token depends on its row's key and its position alone: never on the batch, the
padding or how far other rows have come.

Legend: b rows, v vocabulary, c candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, did_you_mean
from jaxtyping import Array, Float, Int, Key

from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.processors import PROCESSORS
from ed_models.generation.sampling import among_largest, first_argmax


@dataclass(frozen=True, init=False, eq=False)
class TokenChoice:
    """How the next token is chosen: an option of `processors.PROCESSORS` is an attribute.

    A pytree: the values are leaves, so a compiled function accepts any temperature. What makes
    another program is static: `do_sample`, `top_k` and the like, and which options there are at
    all. An option that changes nothing is None, and so are temperature and filters where nothing
    is drawn.

    Attributes:
        do_sample: draw; otherwise the likeliest token is taken.
        values: the options that change something, checked, in the order in which they are applied.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    do_sample: bool
    values: Mapping[str, Any]

    def __init__(self, do_sample: bool = False, **options: object) -> None:
        for name in options:
            if name not in PROCESSORS:
                raise ConfigError(
                    f"{name} changes no logits{did_you_mean(name, PROCESSORS)} "
                    f"(these do: {', '.join(PROCESSORS)})"
                )
        named = {"temperature": 1.0} | {n: v for n, v in options.items() if v is not None}
        values = {}
        for name, processor in PROCESSORS.items():
            if name not in named:
                continue
            value = processor.read(name, named[name])
            idle = processor.drawing and not do_sample
            # Arrays are no values that change nothing.
            off = isinstance(value, float | int | bool | tuple) and value == processor.off
            if not (value is None or idle or off):
                values[name] = value
        object.__setattr__(self, "do_sample", do_sample)
        object.__setattr__(self, "values", values)

    @property
    def reads_source(self) -> bool:
        """Whether an option reads the tokens of the encoder, or of the prompt."""
        return any(PROCESSORS[name].reads_source for name in self.values)

    def without_draw(self) -> TokenChoice:
        """Return the choice without draws: without temperature and filters of draws."""
        values = {n: v for n, v in self.values.items() if not PROCESSORS[n].drawing}
        choice = object.__new__(TokenChoice)
        object.__setattr__(choice, "do_sample", False)
        object.__setattr__(choice, "values", values)
        return choice

    def __getattr__(self, name: str) -> Any:
        if name in PROCESSORS:
            return self.values.get(name)
        raise AttributeError(f"a TokenChoice has no {name!r}{did_you_mean(name, PROCESSORS)}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenChoice):
            return NotImplemented
        (mine, kind), (theirs, other_kind) = jax.tree.flatten(self), jax.tree.flatten(other)
        return kind == other_kind and all(map(np.array_equal, mine, theirs))


_Static = tuple[bool, tuple[tuple[str, Any], ...]]


def _flatten(choice: TokenChoice) -> tuple[list[Any], _Static]:
    names = [(n, v if PROCESSORS[n].static else None) for n, v in choice.values.items()]
    leaves = [v for n, v in choice.values.items() if not PROCESSORS[n].static]
    return leaves, (choice.do_sample, tuple(names))


def _unflatten(static: _Static, leaves: list[Any]) -> TokenChoice:
    choice = object.__new__(TokenChoice)  # traced values cannot be checked, and need not be
    following = iter(leaves)
    values = {n: v if PROCESSORS[n].static else next(following) for n, v in static[1]}
    object.__setattr__(choice, "do_sample", static[0])
    object.__setattr__(choice, "values", values)
    return choice


jax.tree_util.register_pytree_node(TokenChoice, _flatten, _unflatten)


@dataclass(frozen=True)
class Candidates:
    """What may come next.

    Attributes:
        scores: of the candidates, -inf for the impossible; [b, c].
        ids: their tokens, [b, c]; None = the whole vocabulary.
        vocab_size: its size.
    """

    scores: Float[Array, "b c"]
    ids: Int[Array, "b c"] | None
    vocab_size: int

    def spread(self) -> Float[Array, "b v"]:
        """Scores of the whole vocabulary."""
        if self.ids is None:
            return self.scores
        rows = jnp.arange(self.scores.shape[0])[:, None]
        empty = jnp.full((self.scores.shape[0], self.vocab_size), -jnp.inf)
        return empty.at[rows, self.ids].set(self.scores)

    def choose(
        self,
        choice: TokenChoice,
        keys: Key[Array, " b"] | None = None,
        positions: Int[Array, " b"] | None = None,
    ) -> Int[Array, " b"]:
        """One token for each row; keys and positions are needed for drawing."""
        if choice.do_sample:
            assert keys is not None, "drawing needs a key for each row"
            assert positions is not None, "drawing needs the position of each row"
            keys = jax.vmap(jax.random.fold_in)(keys, positions)
            index = jax.vmap(jax.random.categorical)(keys, self.scores)
        else:
            index = first_argmax(self.scores)
        if self.ids is not None:
            index = jnp.take_along_axis(self.ids, index[:, None], axis=-1)[:, 0]
        return index.astype(jnp.int32)


def process(
    logits: Float[Array, "b v"],
    choice: TokenChoice,
    rows: GeneratedRows | None = None,
    *,
    at_least: int = 1,
) -> Candidates:
    """Apply the options to logits.

    Args:
        rows: the tokens of the rows; options that only filter samples do not need them.
        at_least: number of candidates that every filter keeps.
    """
    scores, ids, vocab_size = logits.astype(jnp.float32), None, logits.shape[-1]
    for name, value in choice.values.items():
        processor = PROCESSORS[name]
        if name == "top_k" and max(value, at_least) < vocab_size:
            # Later filters and the draw look at these alone, instead of the whole vocabulary.
            scores, ids = jax.lax.top_k(scores, max(value, at_least))
            continue
        changed = processor.apply(scores, value, rows)  # type: ignore[arg-type]
        if at_least > 1 and processor.drawing:
            changed = jnp.where(
                among_largest(scores, at_least) & jnp.isneginf(changed), scores, changed
            )
        scores = changed
    return Candidates(scores, ids, vocab_size)


def next_token(
    logits: Float[Array, "b v"],
    choice: TokenChoice,
    *,
    keys: Key[Array, " b"] | None = None,
    positions: Int[Array, " b"] | None = None,
    rows: GeneratedRows | None = None,
) -> Int[Array, " b"]:
    """Return one token for each row.

    Args:
        keys, positions: of each row; together they fix the draw, and only drawing needs them.
        rows: the tokens of the rows; see `process`.
    """
    return process(logits, choice, rows).choose(choice, keys, positions)
