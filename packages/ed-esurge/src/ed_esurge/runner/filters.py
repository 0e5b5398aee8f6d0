"""Filters of the sampler that need the whole distribution: top-n-sigma, typical-p, XTC, mirostat.

These filters remove tokens from the middle or the top of the distribution, so the candidates of
`sampler.draw` are not enough. A step computes them only if one of its rows uses such a filter.

Legend: n rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ed_models.generation.sampling import in_nucleus
from jaxtyping import Array, Bool, Float, Int

#: Number of most probable tokens from which mirostat 1 estimates the exponent of Zipf's law.
ZIPF_TOKENS = 100


def top_n_sigma(scaled: Float[Array, "n v"], width: Float[Array, " n"]) -> Bool[Array, "n v"]:
    """Keep logits within `width` standard deviations of the maximum (https://arxiv.org/abs/2411.07641).

    The temperature divides both sides of the comparison, so its order has no effect.

    Args:
        scaled: logits; -inf for tokens that are not allowed.
        width: number of standard deviations; 0 keeps all tokens.
    """
    finite = jnp.isfinite(scaled)
    count = jnp.sum(finite, axis=-1, keepdims=True)
    mean = jnp.sum(jnp.where(finite, scaled, 0.0), axis=-1, keepdims=True) / count
    spread = jnp.where(finite, scaled - mean, 0.0)
    sigma = jnp.sqrt(jnp.sum(spread * spread, axis=-1, keepdims=True) / count)
    least = jnp.max(scaled, axis=-1, keepdims=True) - width[:, None] * sigma
    return (scaled >= least) | (width <= 0)[:, None]


def typical(
    odds: Float[Array, "n v"], kept: Bool[Array, "n v"], mass: Float[Array, " n"]
) -> Bool[Array, "n v"]:
    """Keep the tokens whose surprise is nearest to the entropy, up to a probability mass.

    https://arxiv.org/abs/2202.00666. Tokens are added until their mass exceeds `mass`, including
    the token that exceeds it. Tokens with equal distances are kept or removed together.

    Args:
        odds: probabilities up to a factor.
        kept: the tokens of the distribution.
        mass: 1 keeps all tokens.
    """
    weights = jnp.where(kept, odds, 0.0)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    logs = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0)
    entropy = -jnp.sum(probs * logs, axis=-1, keepdims=True)
    distance = jnp.where(probs > 0, jnp.abs(-logs - entropy), jnp.inf)
    bits = jax.lax.bitcast_convert_type(distance.astype(jnp.float32), jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the mass of distances <= high exceeds `mass`, that of < low does not
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(bits <= middle[:, None], probs, 0.0), axis=-1) > mass
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    most = jnp.full_like(mass, jnp.iinfo(jnp.int32).max, jnp.int32)
    _, least = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(most), most))
    near = bits <= least[:, None]
    return kept & (near | (mass >= 1)[:, None])


def without_top_choices(
    odds: Float[Array, "n v"],
    kept: Bool[Array, "n v"],
    threshold: Float[Array, " n"],
    active: Bool[Array, " n"],
) -> Bool[Array, "n v"]:
    """Remove the tokens with at least a probability, except the least probable of them (XTC).

    The definition is that of llama.cpp and of the original proposal
    (https://github.com/oobabooga/text-generation-webui/pull/6335).

    Args:
        odds: probabilities up to a factor.
        kept: the tokens of the distribution.
        threshold: smallest probability of a top choice.
        active: rows in which the tokens are removed.
    """
    weights = jnp.where(kept, odds, 0.0)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    top = kept & (probs >= threshold[:, None])
    several = jnp.sum(top, axis=-1, keepdims=True) >= 2
    least = jnp.min(jnp.where(top, probs, jnp.inf), axis=-1, keepdims=True)
    return kept & ~(top & several & (probs > least) & active[:, None])


def within_surprise(
    odds: Float[Array, "n v"], limit: Float[Array, " n"], version: Int[Array, " n"]
) -> Bool[Array, "n v"]:
    """Keep the tokens that mirostat allows (https://arxiv.org/abs/2007.14966).

    Version 2 keeps tokens with a surprise of at most `limit`, in bits. Version 1 keeps the `k` most
    probable tokens, where `k` follows from `limit` and Zipf's law. The most probable token is
    always kept.

    Args:
        odds: probabilities up to a factor.
        limit: mu of mirostat.
        version: 1 or 2.
    """
    probs = odds / jnp.sum(odds, axis=-1, keepdims=True)
    best = probs >= jnp.max(probs, axis=-1, keepdims=True)
    second = probs >= jnp.exp2(-limit)[:, None]
    count = min(ZIPF_TOKENS, odds.shape[1])
    top, _ = jax.lax.top_k(probs, count)
    place = jnp.arange(1, count)
    steps = jnp.log((place + 1) / place)
    known = top[:, 1:] > 0
    drops = jnp.where(known, jnp.log(top[:, :-1] / jnp.where(known, top[:, 1:], 1.0)), 0.0)
    zipf = jnp.sum(steps * drops, axis=-1) / jnp.sum(jnp.where(known, steps**2, 0.0), axis=-1)
    excess = zipf - 1
    vocabulary = float(odds.shape[1])
    k = (excess * jnp.exp2(limit) / (1 - vocabulary ** (-excess))) ** (1 / zipf)
    k = jnp.clip(jnp.nan_to_num(k, nan=1.0), 1, odds.shape[1]).astype(jnp.int32)
    return best | jnp.where((version == 1)[:, None], among_best(probs, k), second)


def among_best(odds: Float[Array, "n v"], top_k: Int[Array, " n"]) -> Bool[Array, "n v"]:
    """Return a mask of the `top_k` largest odds of each row, including ties with the smallest.

    The smallest is found by bisection over the bits of float32, since non-negative floats have the
    same order as their bits. The result is exact, in an eighth of the time of a sort on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(odds, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at least top_k values are >= low, fewer than top_k are > high
        middle = low + (high - low + 1) // 2
        enough = jnp.sum(bits >= middle[:, None], axis=-1) >= top_k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    start = jnp.zeros_like(top_k), jnp.max(bits, axis=-1)
    least, _ = jax.lax.fori_loop(0, 31, halve, start)
    return bits >= least[:, None]


def kept_of_filters(
    scaled: Float[Array, "n v"],
    *,
    width: Float[Array, " n"],
    best: Callable[[Float[Array, "n v"]], Bool[Array, "n v"]],
    typical_p: Float[Array, " n"],
    top_p: Float[Array, " n"],
    min_p: Float[Array, " n"],
    xtc_threshold: Float[Array, " n"],
    xtc_active: Bool[Array, " n"],
) -> Bool[Array, "n v"]:
    """Return a mask of the tokens that all filters keep, in the order of llama.cpp's sampler chain.

    Args:
        scaled: scaled logits, whose maximum is 0.
        best: returns a mask of the top-k tokens for given odds.
    """
    kept = top_n_sigma(scaled, width) & jnp.isfinite(scaled)
    odds = jnp.where(kept, jnp.exp(scaled), 0.0)
    kept &= best(odds)
    kept = typical(odds, kept, typical_p)
    odds = jnp.where(kept, odds, 0.0)
    mass = jnp.sum(odds, axis=-1, keepdims=True)
    kept &= in_nucleus(odds, top_p[:, None] * mass) | (top_p >= 1)[:, None]
    odds = jnp.where(kept, odds, 0.0)
    kept &= odds >= min_p[:, None] * jnp.max(odds, axis=-1, keepdims=True)
    return without_top_choices(odds, kept, xtc_threshold, xtc_active)
