"""MARS: AdamW on gradients whose variance is reduced (Yuan et al. 2024, arXiv 2411.10438).

As in the authors' code with its default `optimize_1d=False`, MARS updates only matrices. Vectors,
such as the weights of norms and biases, get plain AdamW (`optimizers.build`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.per_array import create_transformation
from ed_trainers.options.optimizers import MarsSettings


class MarsState(NamedTuple):
    """Number of updates, previous gradient, and the two moments of an array."""

    count: jax.Array
    before: jax.Array
    mu: jax.Array
    nu: jax.Array


def scale_by_mars(settings: MarsSettings) -> optax.GradientTransformation:
    """Return the direction of MARS-AdamW for one matrix.

    The difference to the gradient before is that of two batches ("approximate" in the paper): one
    gradient a step. The corrected gradient is clipped array by array, as the paper's code does.
    """
    b1, b2 = settings.b1, settings.b2

    def init(param: jax.Array) -> MarsState:
        zeros = jnp.zeros_like(param)
        return MarsState(jnp.zeros((), jnp.int32), zeros, zeros, zeros)

    def update(
        grad: jax.Array, state: MarsState, param: jax.Array | None = None
    ) -> tuple[jax.Array, MarsState]:
        del param
        count = state.count + 1
        corrected = grad + settings.gamma * b1 / (1 - b1) * (grad - state.before)
        norm = jnp.sqrt(jnp.sum(jnp.square(corrected.astype(jnp.float32))))
        corrected = corrected / jnp.maximum(norm / settings.max_grad_norm, 1.0)
        mu = b1 * state.mu + (1 - b1) * corrected
        nu = b2 * state.nu + (1 - b2) * jnp.square(corrected)
        mu_hat, nu_hat = mu / (1 - b1**count), nu / (1 - b2**count)
        return mu_hat / (jnp.sqrt(nu_hat) + settings.eps), MarsState(count, grad, mu, nu)

    return create_transformation(init, update)
