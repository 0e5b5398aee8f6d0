"""Cross-attention: queries of a decoder, keys and values of an encoder.

Legend: b batch, s decoder positions, t encoder positions, d hidden, h heads, k head dim.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded
from ed_infra.masks import MaskInfo
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.attention import Mechanism, attend
from ed_layers.attention.blocks.self_attention import _CacheT, get_num_kv_heads
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.cache import HybridCache, LayerCacheSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.projections.linear import project


class CrossAttention(nnx.Module):
    """Attention of decoder tokens to the encoder positions of their own segment.

    A call with `Ctx.encoded` projects its keys and values; with a cache, it also writes them to the
    group "cross". A call without `Ctx.encoded` reads them from the cache.

    Args:
        parts: creates the projections `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        heads, head_dim: h = g, and k; None = the configuration's `num_attention_heads` and
            `num_key_value_heads`, `head_dim`.
        encoder_size: size of the encoder's hidden states; None = the configuration's `hidden_size`.
        bias: whether the projections have a bias.
        key_bias, out_bias: whether the projection of the keys, and that of the outputs, has a bias;
            None = same as `bias`.
        scores: scale and limits of the scores.
    """

    #: Layers whose input is not the tokens of the batch.
    without_tokens: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj")

    def __init__(
        self,
        parts: Parts,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        encoder_size: int | None = None,
        bias: bool = False,
        key_bias: bool | None = None,
        out_bias: bool | None = None,
        scores: ScoreRule = ScoreRule(),  # noqa: B008
    ):
        config = parts.config
        d, h = config.hidden_size, heads or config.num_attention_heads
        g = heads or get_num_kv_heads(config)
        self.head_dim = k = head_dim or getattr(config, "head_dim", None) or d // h
        self.q_proj = parts.linear(d, h * k, axes=("embed", "heads"), bias=bias)
        t, axes = encoder_size or d, ("embed", "kv_heads")
        key_bias = bias if key_bias is None else key_bias
        self.k_proj = parts.linear(t, g * k, axes=axes, bias=key_bias)
        self.v_proj = parts.linear(t, g * k, axes=axes, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = parts.linear(h * k, d, axes=("heads", "embed"), bias=out_bias)
        self.scores = scores
        features = {"cross"} if scores.soft_cap is None else {"cross", "soft_cap"}
        self.mechanism = Mechanism.resolve(
            config,
            features=frozenset(features),
            dropout=getattr(config, "attention_dropout", 0.0),
        )
        self.cache_spec = LayerCacheSpec(g, k, group="cross")

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: _CacheT, layer: Layer
    ) -> tuple[Float[Array, "b s d"], _CacheT]:
        """Return the output of the attention [b, s, d], and the cache."""
        q = self.q_proj(ctx.name_activation(x, "normed_input"), ctx)
        q = ctx.name_activation(q.reshape(*x.shape[:2], -1, self.head_dim), "attn_query")
        keys = values = mask_info = None
        if ctx.encoded is not None:
            keys, values = self.keys_values(ctx.encoded, ctx)
        elif cache is None:
            raise ConfigError(
                "cross-attention has no encoder output: pass `encoded`, or a cache in which an "
                "earlier call stored it"
            )
        if ctx.ragged is None:
            mask_info = self.mask(ctx, None if ctx.encoded is None else ctx.encoded.segment_ids)
        out, cache = attend(
            q,
            keys,
            values,
            mask_info,
            cache=cache,
            layer=layer,
            ragged=ctx.ragged,
            group="cross",
            scale=self.scores.scale,
            soft_cap=self.scores.soft_cap,
            dropout_key=None if ctx.key is None else jax.random.fold_in(ctx.key, 1),
            mechanism=self.mechanism,
        )
        out = ctx.name_activation(out, "attn_output").reshape(*x.shape[:2], -1)
        return ctx.name_activation(self.o_proj(out, ctx), "attn_dense"), cache

    @staticmethod
    def mask(ctx: Ctx, segment_ids: Int[Array, "b t"] | None) -> MaskInfo:
        """Return the mask of decoder tokens over encoder positions; None = those of the cache."""
        assert ctx.mask_info is not None
        queries = ctx.mask_info.q_segment_ids
        keys = queries if segment_ids is None else segment_ids
        index = (jnp.zeros_like(x) for x in (queries, keys))
        return MaskInfo(queries, keys, *index, causal=False)

    def keys_values(
        self, encoded: Encoded, ctx: Ctx | None = None
    ) -> tuple[Float[Array, "b t g k"], Float[Array, "b t g k"]]:
        """Return keys and values of encoder positions."""
        projected = project((self.k_proj, self.v_proj), encoded.embeddings, ctx)
        keys, values = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in projected)
        return keys, values

    def write(
        self, encoded: Encoded, cache: HybridCache, layer: Layer, slot: int | Int[Array, ""]
    ) -> HybridCache:
        """Write keys and values of one encoder output into a slot of a serving engine's cache.

        Args:
            encoded: the encoder output of one sequence, b = 1.
            cache: the cache of the engine, `HybridCache.create_paged`.
            layer: number of the layer in the model.
            slot: the slot of the sequence, as in `RaggedBatch.state_slots`.
        """
        kv = self.keys_values(encoded)
        return cache.write_encoded(layer, kv, slot, encoded.segment_ids)
