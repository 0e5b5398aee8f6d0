"""Proximal policy optimization: from scores of answers to advantages, and the clipped losses.

Schulman et al., arXiv:1707.06347 (eq. 7) and 1506.02438 (advantages); the penalty, the clipped
values and the whitening as in Ziegler et al. (1909.08593) and its descendants, TRL's among them.

An answer's figures are at the positions that predict its tokens, where `weights` is 1. Between
two answers of a row is at least one position with weight 0, so packed rows need no other care.

Legend: r rows, s positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Tokens = Float[Array, "r s"]


def last_of_answers(weights: Tokens) -> Tokens:
    """1 at the position that predicts the last token of each answer."""
    following = jnp.pad(weights[:, 1:], ((0, 0), (0, 1)))
    return weights * (1 - following)


def whiten_values(values: Tokens, weights: Tokens, *, shift_mean: bool = True) -> Tokens:
    """Values of unit variance over all tokens of answers, and of mean 0 or their own; 0 elsewhere.

    The variance is the unbiased one. A single token has none, and is divided by the root of 1e-8.
    """
    count = jnp.sum(weights)
    mean = jnp.sum(weights * values) / jnp.maximum(count, 1)
    centered = values - mean
    variance = jnp.sum(weights * centered**2) / jnp.maximum(count - 1, 1)
    scaled = centered * jax.lax.rsqrt(variance + 1e-8)
    return weights * (scaled if shift_mean else scaled + mean)


def generalized_advantages(
    rewards: Tokens, values: Tokens, weights: Tokens, *, gamma: float, lam: float
) -> Tokens:
    """Discounted sums of `reward + gamma * next value - value` over the rest of each answer.

    An answer ends its episode: behind its last token is no value.

    Args:
        rewards: of each token.
        values: expected return before each token.
        weights: 1 for a token of an answer.
        gamma: discount of a token.
        lam: discount of a temporal difference; 1 means the return minus the value, 0 one
            difference.
    """
    following = jnp.pad((weights * values)[:, 1:], ((0, 0), (0, 1)))
    differences = weights * (rewards + gamma * following - values)

    def body(advantage: jax.Array, token: tuple[jax.Array, jax.Array]):
        difference, weight = token
        advantage = weight * (difference + gamma * lam * advantage)
        return advantage, advantage

    start = jnp.zeros(rewards.shape[:1], rewards.dtype)
    _, sums = jax.lax.scan(body, start, (differences.T, weights.T), reverse=True)
    return sums.T


class Losses(NamedTuple):
    """Losses of tokens, and where clipping decided them; [r, s] each.

    Attributes:
        losses: of each token.
        clipped: 1 where the clipped loss is the larger one.
    """

    losses: jax.Array
    clipped: jax.Array


def policy_losses(ratios: Tokens, advantages: Tokens, *, cliprange: float) -> Losses:
    """`-advantage * ratio`, and at least the value for the ratio clipped to `1 ± cliprange`.

    Args:
        ratios: of the probability of each token to the one before the updates.
        advantages: of each token; no gradient is wanted of them.
    """
    unclipped_losses = -advantages * ratios
    clipped_losses = -advantages * jnp.clip(ratios, 1 - cliprange, 1 + cliprange)
    return Losses(
        jnp.maximum(unclipped_losses, clipped_losses),
        (clipped_losses > unclipped_losses).astype(unclipped_losses.dtype),
    )


def value_losses(
    values: Tokens, old_values: Tokens, returns: Tokens, *, cliprange: float
) -> Losses:
    """Half the squared error, not below that of values held within `old ± cliprange`."""
    clipped_values = jnp.clip(values, old_values - cliprange, old_values + cliprange)
    unclipped_errors, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    return Losses(
        0.5 * jnp.maximum(unclipped_errors, clipped),
        (clipped > unclipped_errors).astype(unclipped_errors.dtype),
    )


def kl_estimates(logps: Tokens, ref_logps: Tokens, estimator: str) -> Tokens:
    """Estimates of `KL(policy || reference)` at each token, of tokens that the policy sampled.

    `k1` is the log-ratio, `k2` half its square, `k3` the log-ratio and `1/ratio - 1`.
    """
    ratio = logps - ref_logps
    match estimator:
        case "k1":
            return ratio
        case "k2":
            return 0.5 * ratio**2
        case "k3":
            return jnp.expm1(-ratio) + ratio
    raise AssertionError(estimator)
