"""Sums over axes, in one order if `batch_invariant` selects that order.

Legend: d summed numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers import fixed_order
from ed_layers.projections.matmul import matmul


def total(x: Float[Array, "*rows d"]) -> Float[Array, "*rows 1"]:
    """Return the sum over the last axis, float32."""
    x = x.astype(jnp.float32)
    if not fixed_order.active():
        return jnp.sum(x, axis=-1, keepdims=True)
    x = fixed_order.unshard_last_axis(x)
    return matmul(x, jnp.ones((1, x.shape[-1]), jnp.float32), transposed=True)


def mean(x: Float[Array, "*rows d"]) -> Float[Array, "*rows 1"]:
    """Return the mean over the last axis, float32."""
    if not fixed_order.active():
        return jnp.mean(x.astype(jnp.float32), axis=-1, keepdims=True)
    return total(x) / x.shape[-1]


def logsumexp(x: Float[Array, "*rows d"]) -> Float[Array, "*rows"]:
    """Return `log(sum(exp(x)))` over the last axis, float32."""
    if not fixed_order.active():
        return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)
    x = fixed_order.unshard_last_axis(x.astype(jnp.float32))
    top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    return (top + jnp.log(total(jnp.exp(x - top))))[..., 0]


def softmax(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Return the softmax over the last axis, float32."""
    x = x.astype(jnp.float32)
    if not fixed_order.active():
        return jax.nn.softmax(x)
    from ed_layers.ordered_program import exp

    top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    powers = exp(x - top)
    return powers / total(powers)


def compute_weighted_sum(
    x: Float[Array, "n k d"], weights: Float[Array, "n k"]
) -> Float[Array, "n d"]:
    """Return the weighted sums over the middle axis, float32."""
    x = x.astype(jnp.float32)
    if not fixed_order.active():
        return jnp.einsum("nkd,nk->nd", x, weights)
    parts = x * weights[..., None]
    return sum((parts[:, i] for i in range(1, x.shape[1])), start=parts[:, 0])


def over_axis(x: Float[Array, "*dims"], axis: int) -> Float[Array, "*dims"]:
    """Return the sum over an axis, in the dtype of `x`.

    One order: the second half of the axis is added to the first half until one number is left. XLA
    changes neither the order of such additions nor their results on a mesh, so the sum needs no
    call of the native library inside a loop.
    """
    if not fixed_order.active():
        return jnp.sum(x, axis=axis)
    axis %= x.ndim
    size = 1 << (x.shape[axis] - 1).bit_length()
    missing = [(0, size - n if at == axis else 0) for at, n in enumerate(x.shape)]
    x = jnp.pad(x, missing)
    while size > 1:
        size //= 2
        first, second = (jax.lax.slice_in_dim(x, i, i + size, axis=axis) for i in (0, size))
        x = first + second
    return jnp.squeeze(x, axis)
