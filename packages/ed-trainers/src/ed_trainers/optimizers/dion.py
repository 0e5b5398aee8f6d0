"""Dion: orthonormal updates of low rank (Ahn et al. 2025, arXiv 2504.05295).

The momentum of a matrix is approximated by `P R'` with one step of power iteration, which starts
from the right factor of the step before. The update is `P Q'`, where Q has the columns of R with
length 1. The approximation leaves the momentum with the factor 1 - `mu`, so the momentum keeps the
parts of the gradients that no update contained yet.

Legend: i in features, o out features, l the longer and s the shorter of them, r rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.per_array import create_transformation
from ed_trainers.options.optimizers import DionSettings


class DionState(NamedTuple):
    """Momentum of a matrix [i, o], and the right factor of its approximation, float32 [s, r]."""

    momentum: jax.Array
    basis: jax.Array


def scale_by_dion(settings: DionSettings) -> optax.GradientTransformation:
    """Return the transformation of Dion for one matrix [i, o]."""

    def init(param: jax.Array) -> DionState:
        shorter = min(param.shape)
        rank = min(shorter, math.ceil(settings.rank_fraction * shorter))
        start = jax.random.normal(jax.random.key(0), (shorter, rank), jnp.float32)
        return DionState(jnp.zeros(param.shape, param.dtype), start)

    def update(
        grad: jax.Array, state: DionState, param: jax.Array | None = None
    ) -> tuple[jax.Array, DionState]:
        del param
        i, o = grad.shape
        total = state.momentum.astype(jnp.float32) + grad.astype(jnp.float32)
        tall = total if i > o else total.T  # [l, s]
        with jax.default_matmul_precision("highest"):
            left_factor = jnp.linalg.qr(tall @ state.basis)[0]
            right_factor = tall.T @ left_factor
            lengths = jnp.linalg.norm(right_factor, axis=0, keepdims=True)
            # Without any gradient, the factor of the step before is kept.
            is_zero = ~jnp.any(tall)
            basis = jnp.where(is_zero, state.basis, right_factor / (lengths + settings.eps))
            tall = tall - (1 - settings.mu) * left_factor @ right_factor.T
            direction = jnp.where(is_zero, 0.0, left_factor @ basis.T)
        momentum, direction = (x if i > o else x.T for x in (tall, direction))
        direction = (o / i) ** 0.5 * direction
        momentum = momentum.astype(state.momentum.dtype)
        return direction.astype(grad.dtype), DionState(momentum, basis)

    return create_transformation(init, update)
