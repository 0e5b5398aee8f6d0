"""A short causal convolution of each channel.

Legend: r rows, c columns, f channels, k taps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ed_layers.cache.spec import StateSpec
from ed_layers.parts import Parts
from ed_layers.recurrence.rows import Rows


class ShortConv(nnx.Module):
    """`y[t] = sum_j kernel[k - 1 - j] x[t - j]`, within a sequence (Hugging Face's `conv1d`).

    The kernel is [k, 1, f]; the state is the last k - 1 inputs, [k - 1, f].

    Args:
        parts: dtypes and initializers.
        channels: f.
        taps: k.
        bias: whether the convolution has a bias, [f].
        axis: logical axis of the channels.
    """

    def __init__(
        self,
        parts: Parts,
        channels: int,
        taps: int,
        *,
        bias: bool = False,
        axis: str | None = "mlp",
    ):
        kernel = parts.initializer(parts.rngs.params(), (taps, 1, channels), parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(None, None, axis))
        if bias:
            self.bias = nnx.Param(jnp.zeros((channels,), parts.param_dtype), axes=(axis,))
        self.dtype = parts.dtype

    def state_spec(self, name: str = "conv") -> StateSpec:
        """The memory of the layer between steps."""
        taps, _, channels = self.kernel.get_value().shape[-3:]
        return StateSpec(name, (taps - 1, channels), jnp.dtype(self.dtype).name)

    def __call__(
        self, x: Float[Array, "r c f"], state: Float[Array, "m k1 f"], rows: Rows
    ) -> tuple[Float[Array, "r c f"], Float[Array, "m k1 f"]]:
        """Return the outputs, and the state after this step."""
        kernel = self.kernel.get_value().astype(self.dtype)[:, 0]
        taps, columns = kernel.shape[0], x.shape[1]
        x = rows.mask_padding(x.astype(self.dtype))
        inputs, state = rows.prepend_history(x, state)
        begun = rows.begun()
        begun_history = None if begun is None else jnp.pad(begun, ((0, 0), (taps - 1, 0)))
        out = jnp.zeros(x.shape, self.dtype)
        for tap in range(taps):
            part = jax.lax.slice_in_dim(inputs, tap, tap + columns, axis=1)
            if begun is not None and begun_history is not None:
                same = jax.lax.slice_in_dim(begun_history, tap, tap + columns, axis=1) == begun
                part = jnp.where(same[..., None], part, 0)
            out = out + part * kernel[tap]
        if hasattr(self, "bias"):
            out = out + self.bias.get_value().astype(self.dtype)
        return out, state
