"""A convolution over the tokens of a segment, as in DeBERTa-v2.

Legend: b batch, s sequence, d features, k taps, g groups, i features of a group.
"""

from __future__ import annotations

import jax.numpy as jnp
from ed_infra.errors import ConfigError
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.parts import Parts


class TokenConv(nnx.Module):
    """`y[t] = bias + sum_j x[t + j - k // 2] kernel[j]`, where tokens of other segments count as 0.

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
