"""Lightning attention (MiniMax 2025): linear attention with a fixed decay rate of each head.

    S[t] = exp(-rate) S[t - 1] + k[t] v[t]^T;  y[t] = S[t]^T q[t]

Legend: b batch, s sequence, d hidden, q rows, c tokens, h heads, k numbers of a head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.activations import activation
from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec, StateSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.native.recurrences import Terms
from ed_layers.parts import Parts
from ed_layers.recurrence.decay import Decay
from ed_layers.recurrence.rows import CHUNK, Rows

#: q, k, v [.., h, k] and g [.., h, 1] of each token.
LightningInputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def linear_terms(inputs: LightningInputs) -> Terms:
    """Return the terms of `linear_attention`."""
    q, k, v, g = (x.astype(jnp.float32) for x in inputs)
    return Terms(q, k, v, jnp.exp(g))


def linear_attention(
    state: Float[Array, "q h k v"], inputs: LightningInputs, begun: Int[Array, "q c"] | None
) -> tuple[Float[Array, "q h k v"], Float[Array, "q c h v"]]:
    """Compute linear attention with decay over a chunk, float32; a `Step` of `Rows.scan`."""
    q, k, v, g = (x.astype(jnp.float32) for x in inputs)
    decay = Decay.of(g, begun)
    return decay.write(k, v, state), decay.attend(q, k, v, state)


class LightningAttention(nnx.Module):
    """A mixer with linear attention; the sizes are those of the configuration's attention.

    Queries, keys and values pass the activation `hidden_act`. One norm covers the outputs of all
    heads, which are then multiplied by the sigmoid of `output_gate`. `qkv_proj` computes query, key
    and value of head 0, then of head 1, and so on.
    """

    #: Number of tokens that are computed in parallel.
    chunk = CHUNK

    def __init__(self, parts: Parts):
        config = parts.config
        d, h = config.hidden_size, config.num_attention_heads
        self.heads, self.layers = h, config.num_hidden_layers
        self.head_dim = k = getattr(config, "head_dim", None) or d // h
        self.qkv_proj = parts.linear(d, 3 * h * k, axes=("embed", "heads"))
        self.output_gate = parts.linear(d, h * k, axes=("embed", "heads"))
        self.norm = parts.norm(h * k, eps=1e-6)
        self.out_proj = parts.linear(h * k, d, axes=("heads", "embed"))
        self.hidden_act = config.hidden_act
        activation(self.hidden_act)
        self.cache_spec = RecurrentSpec((StateSpec("kv", (h, k, k)),))

    def rates(self, layer: Layer) -> Float[Array, " h"]:
        """Return the decay rates of the heads of a layer: smaller for later heads and later
        layers."""
        head_rates = (2.0 ** (-8 / self.heads)) ** np.arange(1, self.heads + 1)
        layer_factors = 1 - np.arange(self.layers) / (self.layers - 1 + 1e-5) + 1e-5
        # A table: XLA divides a traced number of a layer with another rounding than a constant.
        return jnp.asarray(np.outer(layer_factors, head_rates), jnp.float32)[layer]

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the mixer, and the cache."""
        x = ctx.name_activation(x, "normed_input")
        b, s, _ = x.shape
        rows = Rows.of(ctx, (b, s), cache, chunk=self.chunk)
        states = rows.states(cache, layer, self.cache_spec)
        qkv = activation(self.hidden_act)(self.qkv_proj(x, ctx)).astype(jnp.float32)
        qkv = rows.enter(qkv.reshape(b, s, self.heads, 3 * self.head_dim), "heads")
        q, k, v = jnp.split(qkv, 3, axis=-1)
        g = jnp.broadcast_to(-self.rates(layer)[:, None], (*q.shape[:3], 1))
        inputs = (q, rows.mask_padding(k), v, rows.mask_padding(g))
        y, states["kv"] = rows.scan(linear_attention, states["kv"], inputs, linear_terms)
        cache = rows.store(cache, layer, states, self.cache_spec)
        y = self.norm(rows.leave(y).reshape(b, s, -1))
        y = ctx.name_activation(jax.nn.sigmoid(self.output_gate(x, ctx)) * y, "attn_output")
        return ctx.name_activation(self.out_proj(y, ctx), "attn_dense"), cache
