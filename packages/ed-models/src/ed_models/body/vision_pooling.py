"""Pooling of the outputs of a vision tower.

Legend: b images, n patches, d hidden, h heads, k head dim, e pooled size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Bool, Float


class PoolingAttention(nnx.Module):
    """Multi-head attention of one query, with biases."""

    def __init__(self, parts: Parts):
        d = parts.config.hidden_size
        self.heads = parts.config.num_attention_heads
        self.q_proj = parts.linear(d, d, axes=("embed", "heads"), bias=True)
        self.k_proj = parts.linear(d, d, axes=("embed", "heads"), bias=True)
        self.v_proj = parts.linear(d, d, axes=("embed", "heads"), bias=True)
        self.o_proj = parts.linear(d, d, axes=("heads", "embed"), bias=True)

    def __call__(
        self,
        query: Float[Array, " d"],
        x: Float[Array, "b n d"],
        mask: Bool[Array, "b n"] | None,
    ) -> Float[Array, "b d"]:
        """Return the output of the query for each image; `mask` is nonzero for real patches."""
        b, n, d = x.shape
        q = self.q_proj(query.astype(x.dtype)[None]).reshape(self.heads, -1)
        k, v = (f(x).reshape(b, n, self.heads, -1) for f in (self.k_proj, self.v_proj))
        scores = jnp.einsum("hk,bnhk->bhn", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = jnp.where(mask[:, None] != 0, scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return self.o_proj(jnp.einsum("bhn,bnhk->bhk", weights, v).reshape(b, d))


class AttentionPooling(nnx.Module):
    """A trained query attends to the patches; a norm and a feed-forward layer follow."""

    def __init__(self, parts: Parts):
        config, d = parts.config, parts.config.hidden_size
        self.probe = parts.table(1, 1, d, axes=(None, None, "embed"))
        self.attention = PoolingAttention(parts)
        self.layernorm = parts.own_norm(d)
        self.mlp = PoolingMLP(parts)
        self.hidden_act = config.hidden_act

    def __call__(
        self, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None = None
    ) -> Float[Array, "b d"]:
        """Return the features of each image; `mask` is nonzero for real patches."""
        pooled = self.attention(self.probe.get_value()[0, 0], x, mask)
        return pooled + self.mlp(self.layernorm(pooled))


class PoolingMLP(nnx.Module):
    """Two projections of features without positions."""

    def __init__(self, parts: Parts):
        config = parts.config
        d, f = config.hidden_size, config.intermediate_size
        self.up_proj = parts.linear(d, f, axes=("embed", "mlp"), bias=True)
        self.down_proj = parts.linear(f, d, axes=("mlp", "embed"), bias=True)
        self.hidden_act = config.hidden_act

    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "b d"]:
        return self.down_proj(activation(self.hidden_act)(self.up_proj(x)))


class TokenPooling(nnx.Module):
    """A linear layer and an activation of one token (ViT)."""

    def __init__(self, parts: Parts):
        config = parts.config
        d, e = config.hidden_size, config.pooler_output_size
        self.dense = parts.linear(d, e, axes=("embed", None), bias=True)
        self.act = config.pooler_act

    def __call__(self, token: Float[Array, "b d"]) -> Float[Array, "b e"]:
        return activation(self.act)(self.dense(token))
