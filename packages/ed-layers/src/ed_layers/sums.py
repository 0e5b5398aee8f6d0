"""Sums over the last axis, in one order if `batch_invariant` selects that order.

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
    x = fixed_order.whole(x)
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
    x = fixed_order.whole(x.astype(jnp.float32))
    top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    return (top + jnp.log(total(jnp.exp(x - top))))[..., 0]


def softmax(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Return the softmax over the last axis, float32."""
    x = x.astype(jnp.float32)
    if not fixed_order.active():
        return jax.nn.softmax(x)
    powers = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))
    return powers / total(powers)


def weighted(x: Float[Array, "n k d"], weights: Float[Array, "n k"]) -> Float[Array, "n d"]:
    """Return the weighted sums over the middle axis, float32."""
    x = x.astype(jnp.float32)
    if not fixed_order.active():
        return jnp.einsum("nkd,nk->nd", x, weights)
    parts = fixed_order.rounded(x * weights[..., None])
    return sum((parts[:, i] for i in range(1, x.shape[1])), start=parts[:, 0])
