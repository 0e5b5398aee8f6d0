"""Convolutions over time and their norm, as in the front ends of speech models; over tokens, too.

Legend: b batch, t time steps, u time steps of the output, i and o features, g groups, k taps,
s sequence, d features of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ed_layers.parts import Parts


class Convolution(nnx.Module):
    """`y[u] = bias + sum_j x[stride * u + j - padding] kernel[j]`, with zeros outside of x.

    The kernel is [k, i / g, o], and the bias [o]. With p steps of padding on both sides, the output
    has u = (t + 2 p - k) // stride + 1 steps.

    Args:
        parts: dtypes and initializers.
        inputs, outputs: i and o.
        taps: k.
        stride: distance between the windows of neighbouring outputs.
        padding: p.
        groups: g; the outputs of a group depend on the inputs of this group only.
        bias: whether the layer has a bias.
        weight_norm: whether each tap of the kernel is divided by its norm and multiplied by a
            trained `scale`, [k, 1, 1] (Salimans & Kingma 2016).
    """

    def __init__(
        self,
        parts: Parts,
        inputs: int,
        outputs: int,
        *,
        taps: int,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
        weight_norm: bool = False,
    ):
        self.kernel = parts.table(taps, inputs // groups, outputs, axes=(None, None, "embed"))
        if weight_norm:
            norms = norms_of_taps(self.kernel.get_value())
            self.scale = nnx.Param(norms, axes=(None, None, None))
        if bias:
            self.bias = nnx.Param(jnp.zeros((outputs,), parts.param_dtype), axes=("embed",))
        self.taps, self.stride, self.padding, self.groups = taps, stride, padding, groups
        self.dtype, self.precision = parts.dtype, parts.precision

    def __call__(self, x: Float[Array, "b t i"]) -> Float[Array, "b u o"]:
        """Return the outputs."""
        kernel = self.kernel.get_value()
        if hasattr(self, "scale"):
            kernel = kernel * (self.scale.get_value() / norms_of_taps(kernel))
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            window_strides=(self.stride,),
            padding=((self.padding, self.padding),),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=self.groups,
            precision=self.precision,
        )
        return y + self.bias.get_value().astype(self.dtype) if hasattr(self, "bias") else y

    def lengths(self, lengths: Int[Array, " b"]) -> Int[Array, " b"]:
        """Return the number of outputs that rows of these lengths have without padding of rows."""
        return jnp.maximum((lengths + 2 * self.padding - self.taps) // self.stride + 1, 0)


def norms_of_taps(kernel: Float[Array, "k i o"]) -> Float[Array, "k 1 1"]:
    """Return the Euclidean norm of each tap."""
    return jnp.sqrt(jnp.sum(jnp.square(kernel), axis=(1, 2), keepdims=True))


class GroupNorm(nnx.Module):
    """Group norm (Wu & He 2018): zero mean and unit variance of a row's features of one group.

    The statistics are float32, and those of the time steps that are no padding.

    Args:
        parts: dtypes.
        features: i.
        groups: g.
        eps: added to the variance.
    """

    def __init__(self, parts: Parts, features: int, *, groups: int, eps: float = 1e-5):
        self.weight = nnx.Param(jnp.ones((features,), parts.param_dtype), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros((features,), parts.param_dtype), axes=("norm",))
        self.groups, self.eps, self.dtype = groups, eps, parts.dtype

    def __call__(self, x: Float[Array, "b t i"], real: Bool[Array, "b t"]) -> Float[Array, "b t i"]:
        """Return the normalized x; `real` is False for padding."""
        grouped = x.astype(jnp.float32).reshape(*x.shape[:2], self.groups, -1)
        mask = real[:, :, None, None].astype(jnp.float32)
        count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True) * grouped.shape[-1], 1)
        mean = jnp.sum(grouped * mask, axis=(1, 3), keepdims=True) / count
        moved = grouped - mean
        variance = jnp.sum(jnp.square(moved) * mask, axis=(1, 3), keepdims=True) / count
        y = (moved * jax.lax.rsqrt(variance + self.eps)).reshape(x.shape)
        y = y * self.weight.get_value().astype(jnp.float32)
        return (y + self.bias.get_value().astype(jnp.float32)).astype(self.dtype)


def real_steps(lengths: Int[Array, " b"], steps: int) -> Bool[Array, "b t"]:
    """Return which of `steps` time steps are not padding."""
    return jnp.arange(steps) < lengths[:, None]


class TokenConv(nnx.Module):
    """`y[t] = bias + sum_j x[t + j - k // 2] kernel[j]`, where tokens of other segments count as 0.

    DeBERTa-v2 has this convolution.

    The kernel is [k, i, d], and the bias [d].

    Args:
        parts: dtypes and initializers.
        features: d.
        taps: k, an odd number.
        groups: g; the features of a group depend on this group only.

    Raises:
        ConfigError: an even number of taps.
    """

    def __init__(self, parts: Parts, features: int, taps: int, *, groups: int = 1):
        if taps % 2 == 0:
            raise ConfigError(f"a convolution over {taps} tokens has no middle: use an odd number")
        self.kernel = parts.table(taps, features // groups, features, axes=(None, None, "embed"))
        self.bias = nnx.Param(jnp.zeros((features,), parts.param_dtype), axes=("embed",))
        self.groups, self.dtype = groups, parts.dtype

    def __call__(
        self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"]
    ) -> Float[Array, "b s d"]:
        """Return the outputs; `segment_ids` is 0 for padding."""
        kernel = self.kernel.get_value().astype(self.dtype)
        taps, inner = kernel.shape[:2]
        kernel = kernel.reshape(taps, inner, self.groups, -1)
        x = x.astype(self.dtype)
        reach, length = taps // 2, x.shape[1]
        around = jnp.pad(x, ((0, 0), (reach, reach), (0, 0)))
        segments = jnp.pad(segment_ids, ((0, 0), (reach, reach)))
        out = jnp.zeros_like(x)
        for tap in range(taps):
            at = slice(tap, tap + length)
            same = (segments[:, at] == segment_ids) & (segment_ids != 0)
            neighbors = jnp.where(same[..., None], around[:, at], 0)
            neighbors = neighbors.reshape(*neighbors.shape[:2], self.groups, inner)
            out = out + jnp.einsum("bsgi,igo->bsgo", neighbors, kernel[tap]).reshape(out.shape)
        return out + self.bias.get_value().astype(self.dtype)
