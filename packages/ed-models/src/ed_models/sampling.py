"""Choose the next token: greedy, or drawn after the filters that Hugging Face's `generate` has.

The order is Hugging Face's (`transformers/generation/logits_process.py`): repetition penalty,
temperature, top-k, top-p, min-p. The draw for a token depends on its row's key and its position
alone: never on the batch, the padding or how far other rows have come.

Legend: b rows, v vocabulary, c candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from jaxtyping import Array, Bool, Float, Int, Key

#: Values that change nothing; a `TokenChoice` keeps None for them.
_OFF = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TokenChoice:
    """How the next token is chosen.

    A pytree: the numbers are leaves, so that a compiled function takes any temperature. What makes
    another program is static: `do_sample`, `top_k`, and which filters there are at all. A filter
    that changes nothing is None, and so are temperature and filters where nothing is drawn.

    Attributes:
        do_sample: draw; otherwise the likeliest token is taken.
        temperature: logits are divided by it; above 0.
        top_k: draw among the k likeliest; None = all.
        top_p: draw among the fewest likeliest whose probabilities reach it; 1 = all.
        min_p: drop what is less likely than `min_p` times the likeliest; 0 = nothing.
        repetition_penalty: see `penalize_repetition`; 1 = off. It also holds for greedy decoding.

    Raises:
        ConfigError: a value is no number or out of range.
    """

    do_sample: bool = False
    temperature: float | None = 1.0
    top_k: int | None = None
    top_p: float | None = 1.0
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (lambda x: x > 0, "above 0 (for the likeliest token: do_sample=False)"),
            "top_k": (lambda x: x >= 1, "a whole number of at least 1, or None for all"),
            "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
            "repetition_penalty": (lambda x: x > 0, "above 0; 1 is no penalty"),
        }
        for name, (fits, constraint) in limits.items():
            value = getattr(self, name)
            if value is None:
                continue
            kind, convert = (Integral, int) if name == "top_k" else (Real, float)
            number = isinstance(value, kind) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and fits(value)):
                raise ConfigError(f"{name} is {value!r}; it must be {constraint}")
            idle = name in _DRAWING and not self.do_sample
            off = idle or value == _OFF.get(name)
            object.__setattr__(self, name, None if off else convert(value))  # type: ignore[arg-type]


def _flatten(choice: TokenChoice) -> tuple[list[float | None], tuple[bool, int | None]]:
    return [getattr(choice, name) for name in _NUMBERS], (choice.do_sample, choice.top_k)


def _unflatten(static: tuple[bool, int | None], numbers: list[float | None]) -> TokenChoice:
    choice = object.__new__(TokenChoice)  # traced numbers cannot be checked, and need not be
    fields = {"do_sample": static[0], "top_k": static[1]}
    for name, value in (fields | dict(zip(_NUMBERS, numbers, strict=True))).items():
        object.__setattr__(choice, name, value)
    return choice


jax.tree_util.register_pytree_node(TokenChoice, _flatten, _unflatten)


def row_keys(seed: Int[Array, ""] | int, rows: int) -> Key[Array, " b"]:
    """A key for each row: the row folded into the seed, so that seeds share no row."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))


def next_token(
    logits: Float[Array, "b v"],
    choice: TokenChoice,
    *,
    keys: Key[Array, " b"] | None = None,
    positions: Int[Array, " b"] | None = None,
    seen: Bool[Array, "b v"] | None = None,
) -> Int[Array, " b"]:
    """Return one token for each row.

    Args:
        keys, positions: of each row; together they fix the draw, and only drawing needs them.
        seen: tokens that the row holds already; needed for the repetition penalty only.
    """
    logits = logits.astype(jnp.float32)
    if choice.repetition_penalty is not None:
        assert seen is not None, "the repetition penalty needs to know the row"
        logits = penalize_repetition(logits, seen, choice.repetition_penalty)
    if not choice.do_sample:
        return first_argmax(logits)
    assert keys is not None, "drawing needs a key for each row"
    assert positions is not None, "drawing needs the position of each row"
    if choice.temperature is not None:
        logits = logits / choice.temperature
    ids = None
    if choice.top_k is not None and choice.top_k < logits.shape[-1]:
        logits, ids = jax.lax.top_k(logits, choice.top_k)
    if choice.top_p is not None:
        logits = jnp.where(in_nucleus(jax.nn.softmax(logits), choice.top_p), logits, -jnp.inf)
    if choice.min_p is not None:
        logits = jnp.where(likely_enough(logits, choice.min_p), logits, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    if ids is not None:
        drawn = jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
    return drawn.astype(jnp.int32)


def first_argmax(logits: Float[Array, "b v"]) -> Int[Array, " b"]:
    """The first index of each row's maximum; on a CPU several times faster than `jnp.argmax`.

    A row with NaN, which equals nothing, gives the last index.
    """
    v = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.minimum(jnp.min(jnp.where(logits == best, index, v), axis=-1), v - 1)


def penalize_repetition(
    logits: Float[Array, "b v"],
    seen: Bool[Array, "b v"],
    factor: Float[Array, "*b_1"] | float,
) -> Float[Array, "b v"]:
    """Make the tokens that a row holds less likely (CTRL, Keskar et al., 2019).

    Positive logits are divided by the factor, negative ones multiplied.

    Args:
        factor: above 1 for less likely, 1 for no change; one number, or [b, 1].
    """
    penalized = jnp.where(logits < 0, logits * factor, logits / factor)
    return jnp.where(seen, penalized, logits)


def likely_enough(
    logits: Float[Array, "b c"], min_p: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark what is at least `min_p` times as likely as the likeliest (Nguyen et al., 2024).

    Args:
        min_p: 0 marks everything; one number, or [b, 1].
    """
    return logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)


def in_nucleus(
    probs: Float[Array, "b c"], top_p: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark the fewest likeliest candidates whose probabilities sum to at least `top_p`.

    A candidate is in if what is likelier than it weighs less than `top_p` (Holtzman et al., 2019).
    The least probability that is in is found by bisection over the bits of float32 (31 passes,
    exact), which on a CPU costs an eighth of a sort of the vocabulary.

    Args:
        top_p: above 0; one number, or [b, 1].
    """
    # Non-negative floats are ordered as their bits are.
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def halve(_, bounds):
        low, high = bounds  # the answer lies in [low, high]
        middle = low + (high - low) // 2
        likelier = jnp.sum(jnp.where(bits > middle, probs, 0.0), axis=-1, keepdims=True)
        fits = likelier < top_p
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    start = jnp.zeros((probs.shape[0], 1), jnp.int32), jnp.max(bits, axis=-1, keepdims=True)
    _, least = jax.lax.fori_loop(0, 31, halve, start)
    return bits >= least
