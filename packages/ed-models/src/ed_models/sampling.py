"""Choose the next token: greedy, or drawn after the filters that Hugging Face's `generate` has.

The order is Hugging Face's (`transformers/generation/logits_process.py`): repetition penalty,
temperature, top-k, top-p, min-p. The draw for a token depends on its row's seed and its position
alone: never on the batch, the padding or how far other rows have come.

Legend: b rows, v vocabulary, c candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; hashable, because each combination compiles its own step.

    Attributes:
        do_sample: draw; otherwise the likeliest token is taken.
        temperature: logits are divided by it; above 0.
        top_k: draw among the k likeliest; None = all.
        top_p: draw among the fewest likeliest whose probabilities reach it; 1 = all.
        min_p: drop what is less likely than `min_p` times the likeliest; 0 = nothing.
        repetition_penalty: above 1 makes what the row already holds less likely (CTRL, Keskar et
            al., 2019); 1 = off. It also holds for greedy decoding.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (
                self.temperature > 0,
                "above 0 (for the likeliest token: do_sample=False)",
            ),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1, or None for no limit"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 is no penalty"),
        }
        for name, (fits, constraint) in limits.items():
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {constraint}")


def next_token(
    logits: Float[Array, "b v"],
    settings: Sampling,
    *,
    seeds: Int[Array, " b"],
    positions: Int[Array, " b"],
    seen: Bool[Array, "b v"] | None = None,
) -> Int[Array, " b"]:
    """Return one token for each row.

    Args:
        logits: float32.
        seeds, positions: of each row; together they fix the draw.
        seen: tokens that the row holds already; needed for the repetition penalty only.
    """
    logits = logits.astype(jnp.float32)
    if settings.repetition_penalty != 1.0:
        assert seen is not None, "the repetition penalty needs to know the row"
        logits = less_repetition(logits, seen, settings.repetition_penalty)
    if not settings.do_sample:
        return first_argmax(logits)
    logits = logits / settings.temperature
    ids = None
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        logits, ids = jax.lax.top_k(logits, settings.top_k)
    if settings.top_p < 1.0:
        logits = jnp.where(in_nucleus(jax.nn.softmax(logits), settings.top_p), logits, -jnp.inf)
    if settings.min_p > 0.0:
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(settings.min_p)
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    choice = jax.vmap(_draw)(seeds, positions, logits)
    if ids is not None:
        choice = jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0]
    return choice.astype(jnp.int32)


def _draw(seed: Int[Array, ""], position: Int[Array, ""], logits: Float[Array, " c"]):
    return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits)


def less_repetition(
    logits: Float[Array, "b v"], seen: Bool[Array, "b v"], penalty: float | Float[Array, "b 1"]
) -> Float[Array, "b v"]:
    """Apply the repetition penalty to the logits of tokens that a row holds (CTRL, 2019)."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def first_argmax(logits: Float[Array, "b v"]) -> Int[Array, " b"]:
    """The first index of each row's maximum; on CPU several times faster than `jnp.argmax`."""
    v = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.minimum(jnp.min(jnp.where(logits == best, index, v), axis=-1), v - 1)


def in_nucleus(
    probs: Float[Array, "b c"], top_p: float | Float[Array, "b 1"]
) -> Bool[Array, "b c"]:
    """Mark the fewest likeliest candidates whose probabilities sum to at least `top_p`.

    A candidate is in if what is likelier than it weighs less than `top_p`. The least probability
    that is in is found by bisection over the bits of float32 (31 passes, exact), which on a CPU
    costs an eighth of a sort of the vocabulary.
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
