"""Normalisation. Statistics are float32 whatever the compute dtype is. Legend: d hidden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), in the order of Hugging Face's Llama:
    normalise in float32, cast to the compute dtype, then scale."""

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        axes: tuple[str | None] = ("norm",),
    ):
        self.weight = nnx.Param(jnp.ones((features,), param_dtype), axes=axes)
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * scale).astype(self.dtype) * self.weight.get_value().astype(self.dtype)
