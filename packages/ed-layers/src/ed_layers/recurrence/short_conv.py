"""The gated short convolution of LFM2 (Liquid AI 2025): `out(c * conv(b * x))`.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.recurrence.conv import ShortConv
from ed_layers.recurrence.rows import Rows


class GatedShortConv(nnx.Module):
    """A mixer: a short convolution of d channels between two gates.

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
