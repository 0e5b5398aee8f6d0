"""Losses of embeddings, with the formulas of sentence-transformers.

Legend: n pairs, k negatives of a pair, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def unit_vectors(vectors: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Return the vectors, scaled to length one."""
    # Not `norm`, whose gradient at 0 (an empty slot) is not a number.
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))


def ranking_losses(
    anchors: Float[Array, "n d"],
    candidates: Sequence[Float[Array, "n d"]],
    pair_mask: Float[Array, " n"],
    temperatures: Sequence[float],
    *,
    symmetric: bool,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return the InfoNCE loss of each pair, and whether its positive is the nearest text.

    Args:
        anchors: unit vectors.
        candidates: unit vectors of the positives, then of each column of negatives; all of them are
            candidates for each anchor.
        pair_mask: 1 where there is a pair.
        temperatures: divisors of the cosines, whose losses are averaged.
        symmetric: also find the anchor of each positive.
    """
    gap = jnp.where(pair_mask > 0, 0.0, -jnp.inf)
    positives = anchors @ candidates[0].T
    negatives = [anchors @ negative.T for negative in candidates[1:]]
    candidate_scores = jnp.concatenate([positives, *negatives], axis=-1)
    gaps = jnp.tile(gap, len(candidates))
    losses = jnp.zeros_like(pair_mask)
    ways = (
        [(candidate_scores, gaps), (positives.T, gap)] if symmetric else [(candidate_scores, gaps)]
    )
    for scores, outside in ways:
        for temperature in temperatures:
            total = jax.nn.logsumexp(scores / temperature + outside, axis=-1)
            losses += jnp.where(pair_mask > 0, total - jnp.diagonal(scores) / temperature, 0.0)
    nearest = jnp.argmax(candidate_scores + gaps, axis=-1) == jnp.arange(pair_mask.size)
    return losses / (len(ways) * len(temperatures)), nearest.astype(jnp.float32)


def cosent_loss(
    cosines: Float[Array, " n"],
    scores: Float[Array, " n"],
    pair_mask: Float[Array, " n"],
    temperature: float,
) -> Float[Array, ""]:
    """Return `log(1 + sum exp((cosine_i - cosine_j) / temperature))` over `score_i < score_j`."""
    differences = (cosines[:, None] - cosines[None, :]) / temperature
    wrong = (
        (scores[:, None] < scores[None, :]) & (pair_mask[:, None] > 0) & (pair_mask[None, :] > 0)
    )
    masked = jnp.where(wrong, differences, -jnp.inf).reshape(-1)
    return jax.nn.logsumexp(jnp.concatenate([jnp.zeros(1), masked]))


def margin_losses(
    anchors: Float[Array, "n d"],
    positives: Float[Array, "n d"],
    negatives: Sequence[Float[Array, "n d"]],
    margins: Sequence[Float[Array, " n"]],
) -> Float[Array, " n"]:
    """Return the squared error of the margins between dot products (arXiv:2010.02666).

    The errors of several negatives of a pair are averaged.
    """
    positive = jnp.sum(anchors * positives, axis=-1)
    errors = [
        (positive - jnp.sum(anchors * negative, axis=-1) - margin) ** 2
        for negative, margin in zip(negatives, margins, strict=True)
    ]
    return sum(errors[1:], errors[0]) / len(errors)
