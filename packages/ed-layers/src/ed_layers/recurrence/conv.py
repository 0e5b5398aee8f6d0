"""A short causal convolution of each channel, and the mixer of LFM2 around it.

Legend: r rows, c columns, f channels, k taps, b batch, s sequence, d hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec, StateSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
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


class GatedShortConv(nnx.Module):
    """The mixer of LFM2 (Liquid AI 2025), a convolution between two gates: `out(c * conv(b * x))`.

    Args:
        parts: creates the projections.
        taps: taps of the convolution.
        bias: whether the projections and the convolution have a bias.
    """

    def __init__(self, parts: Parts, taps: int, *, bias: bool = False):
        d = parts.config.hidden_size
        self.b_proj = parts.linear(d, d, axes=("embed", "mlp"), bias=bias)
        self.c_proj = parts.linear(d, d, axes=("embed", "mlp"), bias=bias)
        self.x_proj = parts.linear(d, d, axes=("embed", "mlp"), bias=bias)
        self.conv1d = ShortConv(parts, d, taps, bias=bias)
        self.out_proj = parts.linear(d, d, axes=("mlp", "embed"), bias=bias)
        self.cache_spec = RecurrentSpec((self.conv1d.state_spec(),))

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the mixer, and the cache."""
        x = ctx.name_activation(x, "normed_input")
        b, s, _ = x.shape
        rows = Rows.of(ctx, (b, s), cache)
        states = rows.states(cache, layer, self.cache_spec)
        u = rows.enter(self.b_proj(x, ctx) * self.x_proj(x, ctx), "mlp")
        u, states["conv"] = self.conv1d(u, states["conv"], rows)
        cache = rows.store(cache, layer, states, self.cache_spec)
        y = ctx.name_activation(self.c_proj(x, ctx) * rows.leave(u), "attn_output")
        return ctx.name_activation(self.out_proj(y, ctx), "attn_dense"), cache
