"""Normalization layers. Statistics are float32 for every compute dtype. Legend: d features."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.depth.remat import call_with_remat
from ed_layers.sums import mean


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019).

    Args:
        features: d.
        eps: added to the mean square.
        offset: constant added to the stored weight (1 in Gemma, which stores `weight - 1`).
        scale_first: scale in float32, then cast (Gemma, OLMo 2); otherwise cast to the compute
            dtype, then scale, as Hugging Face's Llama does.
        weight: whether the norm has a weight.
        dtype, param_dtype: dtypes of the result and of the weight.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        scale_first: bool = False,
        weight: bool = True,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        axes: tuple[str | None] = ("norm",),
    ):
        if weight:
            self.weight = nnx.Param(jnp.full((features,), 1.0 - offset, param_dtype), axes=axes)
        self.eps, self.offset, self.scale_first = eps, offset, scale_first
        self.has_weight = weight
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        return call_with_remat(
            self.build_function(), x, self.weight.get_value() if self.has_weight else None
        )

    def build_function(self) -> Callable[..., Array]:
        """Apply the norm as a function of x and the weight."""
        eps, offset, dtype = self.eps, self.offset, self.dtype
        scale_dtype = jnp.float32 if self.scale_first else dtype

        def normalize(x: Float[Array, "*rows d"], weight: Float[Array, " d"] | None):
            x = x.astype(jnp.float32)
            x = x * jax.lax.rsqrt(mean(jnp.square(x)) + eps)
            if weight is None:
                return x.astype(dtype)
            weight = weight.astype(scale_dtype)
            if offset:
                weight = weight + offset
            return (x.astype(scale_dtype) * weight).astype(dtype)

        return normalize


class LayerNorm(nnx.Module):
    """Layer norm (Ba et al. 2016): zero mean, unit variance, then weight and bias, in float32.

    Args:
        shape: shape of weight and bias: (d,), or (heads, d) with separate weights per head.
        eps: added to the variance.
        weight, bias: whether the norm has a weight or a bias.
        offset: constant added to the stored weight (1 in Nemotron).
    """

    def __init__(
        self,
        *shape: int,
        eps: float = 1e-5,
        weight: bool = True,
        bias: bool = True,
        offset: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        axes = (*(None,) * (len(shape) - 1), "norm")
        if weight:
            self.weight = nnx.Param(jnp.full(shape, 1.0 - offset, param_dtype), axes=axes)
        if bias:
            self.bias = nnx.Param(jnp.zeros(shape, param_dtype), axes=axes)
        self.has_weight, self.has_bias = weight, bias
        self.eps, self.offset, self.dtype = eps, offset, dtype

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        weight = self.weight.get_value() if self.has_weight else None
        bias = self.bias.get_value() if self.has_bias else None
        return call_with_remat(self.build_function(), x, weight, bias)

    def build_function(self) -> Callable[..., Array]:
        """Apply the norm as a function of x, the weight and the bias."""
        eps, offset, dtype = self.eps, self.offset, self.dtype

        def normalize(
            x: Float[Array, "*rows d"], weight: jax.Array | None, bias: jax.Array | None
        ) -> Float[Array, "*rows d"]:
            x = x.astype(jnp.float32)
            x = x - mean(x)
            x = x * jax.lax.rsqrt(mean(jnp.square(x)) + eps)
            if weight is not None:
                x = x * (weight.astype(jnp.float32) + offset)
            if bias is not None:
                x = x + bias.astype(jnp.float32)
            return x.astype(dtype)

        return normalize


class GatedRMSNorm(nnx.Module):
    """Root-mean-square norm with a gate, used by recurrent layers before the last projection.

    Args:
        features: d.
        eps: added to the mean square.
        groups: number of parts of d that are normalized separately.
        gate_first: `norm(x * act(gate)) * weight` (Mamba-2); otherwise `norm(x) * weight *
            act(gate)` (gated delta rule).
        act: activation of the gate.
        dtype, param_dtype: dtypes of the result and of the weight.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        groups: int = 1,
        gate_first: bool = True,
        act: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.weight = nnx.Param(jnp.ones((features,), param_dtype), axes=("norm",))
        self.eps, self.groups, self.gate_first, self.act = eps, groups, gate_first, act
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*rows d"], gate: Float[Array, "*rows d"]
    ) -> Float[Array, "*rows d"]:
        gate = self.act(gate.astype(jnp.float32))
        x = x.astype(jnp.float32)
        x = x * gate if self.gate_first else x
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        x = (parts * jax.lax.rsqrt(mean(jnp.square(parts)) + self.eps)).reshape(x.shape)
        x = x * self.weight.get_value().astype(jnp.float32)
        return (x if self.gate_first else x * gate).astype(self.dtype)
