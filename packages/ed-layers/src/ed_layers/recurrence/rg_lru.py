"""The real-gated linear recurrent unit of Griffin and RecurrentGemma (De et al. 2024).

    h[t] = a[t] h[t - 1] + sqrt(1 - a[t]^2) i[t] x[t],  a[t] = exp(-8 softplus(A) r[t])

The gates `i` and `r` are sigmoids of linear functions of blocks of x. The factor of the first token
of a sequence is 1 instead of the square root.

Legend: b batch, s sequence, d hidden, q rows, c tokens, f channels, n blocks, w channels of a
block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers import fixed_order
from ed_layers.activations import activation
from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec, StateSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.projections.matmul import matmul
from ed_layers.recurrence.conv import ShortConv
from ed_layers.recurrence.rows import CHUNK, Rows

Pair = tuple[jax.Array, jax.Array]


def diagonal(
    state: Float[Array, "q f"],
    inputs: tuple[Float[Array, "q c f"], Float[Array, "q c f"]],
    begun: Int[Array, "q c"] | None,
) -> tuple[Float[Array, "q f"], Float[Array, "q c f"]]:
    """Compute `h[t] = exp(g[t]) h[t - 1] + x[t]` for the inputs (g, x); a `Step` of `Rows.scan`."""
    g, x = inputs
    a = jnp.exp(g)
    if begun is not None:
        a = jnp.where(jnp.diff(begun, axis=1, prepend=0)[..., None] > 0, 0, a)
    if x.shape[1] == 1:
        h = x + a * state[:, None]
        return h[:, 0], h
    x = x.at[:, 0].add(a[:, 0] * state)

    def combine_steps(previous_step: Pair, right: Pair) -> Pair:
        return previous_step[0] * right[0], right[0] * previous_step[1] + right[1]

    h = jax.lax.associative_scan(combine_steps, (a, x), axis=1)[1]
    return h[:, -1], h


class RGLRU(nnx.Module):
    """The recurrent block of RecurrentGemma: `linear_out(lru(conv(linear_x(x))) act(linear_y(x)))`.

    Args:
        parts: creates the projections.
        width: f.
        blocks: n; the gates mix the channels of a block.
        taps: taps of the convolution.
        hidden_act: Hugging Face's name of the activation.
    """

    #: Number of tokens that are computed in parallel.
    chunk = CHUNK

    def __init__(self, parts: Parts, width: int, blocks: int, *, taps: int, hidden_act: str):
        d, w = parts.config.hidden_size, width // blocks
        self.linear_x = parts.linear(d, width, axes=("embed", "mlp"), bias=True)
        self.linear_y = parts.linear(d, width, axes=("embed", "mlp"), bias=True)
        self.linear_out = parts.linear(width, d, axes=("mlp", "embed"), bias=True)
        self.conv1d = ShortConv(parts, width, taps, bias=True)
        for name in ("input_gate", "recurrent_gate"):
            kernel = parts.initializer(parts.rngs.params(), (blocks, w, w), parts.param_dtype)
            setattr(self, f"{name}_weight", nnx.Param(kernel, axes=("heads", None, None)))
            bias = jnp.zeros((blocks, w), parts.param_dtype)
            setattr(self, f"{name}_bias", nnx.Param(bias, axes=("heads", None)))
        # The decay is between 0.9 and 0.999 if the gate is open.
        square = jax.random.uniform(parts.rngs.params(), (width,), minval=0.81, maxval=0.998)
        rate = jnp.log(jnp.expm1(-0.5 * jnp.log(square))).astype(parts.param_dtype)
        self.recurrent_param = nnx.Param(rate, axes=("mlp",))
        self.hidden_act, self.dtype = hidden_act, parts.dtype
        activation(hidden_act)
        self.cache_spec = RecurrentSpec((self.conv1d.state_spec(), StateSpec("h", (width,))))

    def sigmoid(self, name: str, x: Float[Array, "b s f"]) -> Float[Array, "b s f"]:
        """Return a gate, float32."""
        weight = getattr(self, f"{name}_weight").get_value().astype(x.dtype)
        bias = getattr(self, f"{name}_bias").get_value().astype(x.dtype)
        parts = x.reshape(*x.shape[:2], *bias.shape)
        if fixed_order.active():
            blocks = range(len(weight))
            y = jnp.stack([matmul(parts[:, :, i], weight[i]) for i in blocks], axis=2)
        else:
            y = jnp.einsum("bsnw,nwo->bsno", parts, weight)
        return jax.nn.sigmoid((y + bias).astype(jnp.float32)).reshape(x.shape)

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the block, and the cache."""
        x = ctx.name_activation(x, "normed_input")
        b, s, _ = x.shape
        rows = Rows.of(ctx, (b, s), cache, chunk=self.chunk)
        states = rows.states(cache, layer, self.cache_spec)
        u = rows.enter(self.linear_x(x, ctx), "mlp")
        u, states["conv"] = self.conv1d(u, states["conv"], rows)
        rate = jax.nn.softplus(self.recurrent_param.get_value().astype(jnp.float32))
        g = -8.0 * self.sigmoid("recurrent_gate", u) * rate
        u = u.astype(jnp.float32) * self.sigmoid("input_gate", u)
        first = rows.enter(ctx.position_ids == 0)[..., None]
        u = u * jnp.where(first, 1.0, root(-jnp.expm1(2 * g)))
        y, states["h"] = rows.scan(
            diagonal, states["h"], (rows.mask_padding(g), rows.mask_padding(u))
        )
        cache = rows.store(cache, layer, states, self.cache_spec)
        y = rows.leave(y).astype(self.dtype)
        y = ctx.name_activation(
            y * activation(self.hidden_act)(self.linear_y(x, ctx)), "attn_output"
        )
        return ctx.name_activation(self.linear_out(y, ctx), "attn_dense"), cache


@jax.custom_jvp
def root(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return the square root; its slope is at most 1000."""
    return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return jnp.sqrt(x), dx * jax.lax.rsqrt(jnp.maximum(4.0 * x, 1e-6))
