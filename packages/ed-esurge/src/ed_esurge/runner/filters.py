"""Filters of the sampler that need the whole distribution: top-n-sigma, typical-p, XTC, mirostat.

These filters remove tokens from the middle or the top of the distribution, so the candidates of
`sampler.draw` are not enough. They are a program of their own, which runs between the model and the
sampler if a row uses such a filter. Its result is a mask of tokens, like that of a grammar.

Legend: n rows, v vocabulary, w words of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ed_models.generation.sampling import in_nucleus, is_typical
from jaxtyping import Array, Bool, Float, Int

from ed_esurge.runner.row_numbers import OF_FILTERS, OF_SAMPLING, split_columns
from ed_esurge.runner.sampler import adjust, among_best, permit, scaled_logits, token_noise
from ed_esurge.runner.sampler_rows import SamplerRows, SamplerState

#: Number of rows of the program of the filters. A step calls the program once per group of rows.
FILTER_ROWS = 8
#: Number of most probable tokens from which mirostat 1 estimates the exponent of Zipf's law.
ZIPF_TOKENS = 100


@dataclass(frozen=True)
class FilterRows:
    """Options of the rows with filters; all fields have shape [n].

    Attributes:
        sampling: options of the sampler, with all limits (top-k, top-p, min-p).
    """

    sampling: SamplerRows
    typical_p: Float[Array, " n"]
    top_n_sigma: Float[Array, " n"]
    xtc_probability: Float[Array, " n"]
    xtc_threshold: Float[Array, " n"]

    @classmethod
    def of(cls, numbers: Int[Array, "k n"]) -> FilterRows:
        """Return the rows of the numbers of `SlotTables.filtered`."""
        named = split_columns(numbers, ("position", *OF_SAMPLING, *OF_FILTERS))
        filter_values = {name: named.pop(name) for name in OF_FILTERS}
        return cls(SamplerRows(**named), **filter_values)


def take_filter_rows(
    logits: Float[Array, "n v"], allowed: Int[Array, "n w"], index: Int[Array, " r"]
) -> tuple[Float[Array, "r v"], Int[Array, "r w"]]:
    """Return a few rows of the logits and of the masks. An index out of range gives any row."""
    return logits.at[index].get(mode="clip"), allowed.at[index].get(mode="clip")


def merge_rows(
    allowed: Int[Array, "n w"], index: Int[Array, " r"], few: Int[Array, "r w"]
) -> Int[Array, "n w"]:
    """Return the masks with a few rows replaced. An index out of range writes nothing."""
    return allowed.at[index].set(few, mode="drop")


def get_allowed_bits(
    logits: Float[Array, "n v"],
    numbers: Int[Array, "k n"],
    state: SamplerState,
    allowed: Int[Array, "n w"],
) -> Int[Array, "n w"]:
    """Return the bits of the tokens that grammars and filters allow.

    Args:
        logits: logits of the model.
        numbers: see `SlotTables.filtered`.
        state: state of the sampler.
        allowed: bits of the tokens that the grammars allow.
    """
    rows = FilterRows.of(numbers)
    adjusted = permit(adjust(logits.astype(jnp.float32), rows.sampling, state), allowed)
    scaled = scaled_logits(adjusted, rows.sampling)
    mu = state.mu.at[rows.sampling.slot].get(mode="fill", fill_value=0)
    keep_mask = kept_tokens(scaled, rows, mu)
    padding = 32 * allowed.shape[1] - keep_mask.shape[1]
    bits = jnp.pad(keep_mask, ((0, 0), (0, padding))).reshape(*allowed.shape, 32)
    return jnp.sum(bits.astype(jnp.int32) << jnp.arange(32), axis=-1, dtype=jnp.int32) & allowed


def kept_tokens(
    scaled: Float[Array, "n v"], rows: FilterRows, mu: Float[Array, " n"]
) -> Bool[Array, "n v"]:
    """Return a mask of the tokens that all filters keep, in the order of llama.cpp's sampler chain.

    Mirostat replaces all other filters, as in llama.cpp.

    Args:
        scaled: scaled logits, whose maximum is 0.
        rows: options.
        mu: limits of the surprise of mirostat.
    """
    sampling = rows.sampling
    within = within_surprise(jnp.exp(scaled), mu, sampling.mirostat)
    keep_mask = top_n_sigma(scaled, rows.top_n_sigma) & jnp.isfinite(scaled)
    odds = jnp.where(keep_mask, jnp.exp(scaled), 0.0)
    keep_mask &= among_best(odds, sampling.top_k) | (sampling.top_k == 0)[:, None]
    typical_mask = is_typical(jnp.where(keep_mask, scaled, -jnp.inf), rows.typical_p[:, None])
    keep_mask &= typical_mask | (rows.typical_p >= 1)[:, None]
    odds = jnp.where(keep_mask, odds, 0.0)
    mass = jnp.sum(odds, axis=-1, keepdims=True)
    keep_mask &= in_nucleus(odds, sampling.top_p[:, None] * mass) | (sampling.top_p >= 1)[:, None]
    odds = jnp.where(keep_mask, odds, 0.0)
    keep_mask &= odds >= sampling.min_p[:, None] * jnp.max(odds, axis=-1, keepdims=True)
    words = jnp.full((len(mu), 1), jnp.iinfo(jnp.int32).max)  # no id of a token
    chance = jnp.exp(-jnp.exp(-token_noise(sampling, words)[:, 0]))  # uniform in (0, 1)
    active = chance < rows.xtc_probability
    keep_mask = without_top_choices(odds, keep_mask, rows.xtc_threshold, active)
    return jnp.where((sampling.mirostat > 0)[:, None], within, keep_mask)


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


def without_top_choices(
    odds: Float[Array, "n v"],
    keep_mask: Bool[Array, "n v"],
    threshold: Float[Array, " n"],
    active: Bool[Array, " n"],
) -> Bool[Array, "n v"]:
    """Remove the tokens with at least a probability, except the least probable of them (XTC).

    The definition is that of llama.cpp and of the original proposal
    (https://github.com/oobabooga/text-generation-webui/pull/6335).

    Args:
        odds: probabilities up to a factor.
        keep_mask: the tokens of the distribution.
        threshold: smallest probability of a top choice.
        active: rows in which the tokens are removed.
    """
    weights = jnp.where(keep_mask, odds, 0.0)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    top = keep_mask & (probs >= threshold[:, None])
    has_multiple = jnp.sum(top, axis=-1, keepdims=True) >= 2
    least = jnp.min(jnp.where(top, probs, jnp.inf), axis=-1, keepdims=True)
    return keep_mask & ~(top & has_multiple & (probs > least) & active[:, None])


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
    is_positive = top[:, 1:] > 0
    drops = jnp.where(
        is_positive, jnp.log(top[:, :-1] / jnp.where(is_positive, top[:, 1:], 1.0)), 0.0
    )
    zipf = jnp.sum(steps * drops, axis=-1) / jnp.sum(jnp.where(is_positive, steps**2, 0.0), axis=-1)
    excess = zipf - 1
    vocabulary = float(odds.shape[1])
    k = (excess * jnp.exp2(limit) / (1 - vocabulary ** (-excess))) ** (1 / zipf)
    k = jnp.clip(jnp.nan_to_num(k, nan=1.0), 1, odds.shape[1]).astype(jnp.int32)
    return best | jnp.where((version == 1)[:, None], among_best(probs, k), second)
