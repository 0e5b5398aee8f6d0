"""The body of encoder-decoders: a token embedding, a stack of encoder layers, and a stack of
decoder layers that read the encoder output by cross-attention.

Legend: b batch, t encoder positions, s decoder positions, d hidden, n buckets, h heads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import Encoded, Inputs
from ed_infra.outputs import BaseModelOutput, LayerReport
from ed_infra.rope.frequencies import RopeSettings
from ed_layers import native
from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.cache import HybridCache
from ed_layers.cache.protocol import ContiguousCache
from ed_layers.cache.spec import LayerSpecs, flatten_specs
from ed_layers.context import Ctx, name_activation
from ed_layers.parts import MakePart, Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.context import embed_input_ids, layer_context
from ed_models.body.layers import Attention, DecoderLayer, FeedForward, SandwichLayer


class CrossAttentionLayer(DecoderLayer):
    """A decoder layer: self-attention, cross-attention, feed-forward.

    Args:
        parts: creates the norms.
        self_attn, cross_attn: attention to the decoder's and to the encoder's positions.
        mlp: the feed-forward layer.
        dropout: dropout rate of the three outputs in training.
        post_norm: whether the norms follow the three additions, instead of preceding the parts.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        self_attn: Attention,
        cross_attn: CrossAttention,
        mlp: FeedForward,
        dropout: float = 0.0,
        post_norm: bool = False,
    ):
        super().__init__(parts, self_attn=self_attn, mlp=mlp, dropout=dropout)
        self.cross_attn, self.post_norm = cross_attn, post_norm
        self.cross_attention_layernorm = parts.own_norm(parts.config.hidden_size)

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(self.before(self.input_layernorm, x), ctx, cache, layer)
        x = x + ctx.apply_dropout(attended, self.dropout, "attention")
        x = self.after(self.input_layernorm, x)
        read, cache = self.cross_attn(
            self.before(self.cross_attention_layernorm, x), ctx, cache, layer
        )
        x = x + ctx.apply_dropout(read, self.dropout, "cross_attention")
        x = ctx.name_activation(self.after(self.cross_attention_layernorm, x), "residual")
        out, report = self.feed_forward(self.before(self.post_attention_layernorm, x), ctx)
        x = x + ctx.apply_dropout(out, self.dropout, "mlp")
        return self.after(self.post_attention_layernorm, x), cache, report

    def before(self, norm: Any, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return the input of a part."""
        return x if self.post_norm else norm(x)

    def after(self, norm: Any, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return the stream after an addition."""
        return norm(x) if self.post_norm else x

    def cache_specs(self):
        return flatten_specs(self.self_attn.cache_spec, self.cross_attn.cache_spec)


class SandwichCrossLayer(SandwichLayer):
    """A decoder layer with norms before and after its three parts (T5Gemma).

    Args:
        parts: creates the norms.
        self_attn, cross_attn: attention to the decoder's and to the encoder's positions.
        mlp: the feed-forward layer.
        dropout: dropout rate of the three outputs in training.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        self_attn: Attention,
        cross_attn: CrossAttention,
        mlp: FeedForward,
        dropout: float = 0.0,
    ):
        super().__init__(parts, self_attn=self_attn, mlp=mlp, dropout=dropout)
        self.pre_cross_attn_layernorm = parts.own_norm(parts.config.hidden_size)
        self.cross_attn = cross_attn
        self.post_cross_attn_layernorm = parts.own_norm(parts.config.hidden_size)

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(self.input_layernorm(x), ctx, cache, layer)
        attended = self.post_attention_layernorm(attended)
        x = x + ctx.apply_dropout(attended, self.dropout, "attention")
        read, cache = self.cross_attn(self.pre_cross_attn_layernorm(x), ctx, cache, layer)
        read = self.post_cross_attn_layernorm(read)
        x = ctx.name_activation(
            x + ctx.apply_dropout(read, self.dropout, "cross_attention"), "residual"
        )
        out, report = self.branch(x, ctx)
        out = self.post_feedforward_layernorm(out)
        return x + ctx.apply_dropout(out, self.dropout, "mlp"), cache, report

    def cache_specs(self):
        return flatten_specs(self.self_attn.cache_spec, self.cross_attn.cache_spec)


class LayerStack(nnx.Module):
    """`norm(layers(x))`, with one table of relative position buckets for all layers.

    Args:
        parts: creates the layers and the norm.
        layer: creates a layer.
        depth: number of layers.
        kinds: one value per layer if the layers differ; see `ed_layers.depth.stack.Stack`.
        buckets: number of relative position buckets; 0 = the family has none.
        summary_buckets: the same for summaries of blocks (LongT5).
        dropout: dropout rate of the inputs and the outputs in training.
    """

    def __init__(
        self,
        parts: Parts,
        layer: MakePart,
        depth: int,
        *,
        kinds: Sequence[Hashable] | None = None,
        buckets: int = 0,
        summary_buckets: int = 0,
        dropout: float = 0.0,
    ):
        config = parts.config
        self.layers = parts.stack(layer, depth, kinds=kinds)
        self.norm = parts.own_norm(config.hidden_size)
        if buckets:
            self.relative_attention_bias = parts.table(
                buckets, config.num_attention_heads, axes=(None, "heads")
            )
        if summary_buckets:
            self.global_relative_attention_bias = parts.table(
                summary_buckets, config.num_attention_heads, axes=(None, "heads")
            )
        self.dropout = dropout

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: object, *, keep_hidden: bool = False
    ) -> tuple[Float[Array, "b s d"], Any, LayerReport, tuple[jax.Array, ...] | None]:
        """Run the layers; see `ed_layers.depth.stack.Stack`."""
        if hasattr(self, "relative_attention_bias"):
            ctx = replace(ctx, buckets=self.relative_attention_bias.get_value())
        if hasattr(self, "global_relative_attention_bias"):
            table = self.global_relative_attention_bias.get_value()
            ctx = replace(ctx, summary_buckets=table)
        x = ctx.apply_dropout(x, self.dropout, "embeddings")
        x, cache, report, hidden = self.layers(x, ctx, cache, keep_hidden=keep_hidden)
        return ctx.apply_dropout(self.norm(x), self.dropout, "output"), cache, report, hidden


class EncoderDecoder(EasyDeLBaseModule):
    """An encoder and a decoder that share the token embedding.

    Attributes:
        encoder_layer, decoder_layer: create the layers.
        embed_tokens: the embedding of the decoder.
        encoder_embed_tokens: the embedding of the encoder if it is separate.
        ropes: the rotary settings, see `layer_context`; None = those of the configuration.
    """

    ropes: ClassVar[dict[str, RopeSettings] | None] = {}

    encoder_layer: ClassVar[MakePart]
    decoder_layer: ClassVar[MakePart]

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        parts = replace(parts, norm_of_family=self.build_norm(parts))
        self.add_embeddings(parts)
        self.encoder = self.encoder_stack(parts)
        self.decoder = self.decoder_stack(parts)

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.decoder_config.hidden_size

    @property
    def encoder_config(self) -> Any:
        """The configuration of the encoder's layers."""
        return self.config

    @property
    def decoder_config(self) -> Any:
        """The configuration of the decoder's layers."""
        return self.config

    def add_embeddings(self, parts: Parts) -> None:
        """Create `embed_tokens`, and `encoder_embed_tokens` if the encoder has its own."""
        self.embed_tokens = parts.embed(parts.config.vocab_size, parts.config.hidden_size)

    @property
    def embed_scale(self) -> float:
        """Factor on the embeddings of the decoder's tokens."""
        return 1.0

    @property
    def encoder_embed_scale(self) -> float:
        """Factor on the embeddings of the encoder's tokens."""
        return self.embed_scale

    @staticmethod
    def build_norm(parts: Parts) -> Callable[..., nnx.Module]:
        """Return the function that creates the family's norms from the shape of the weights."""
        return parts.norm

    @classmethod
    def encoder_stack(cls, parts: Parts) -> Any:
        """Create the layers of the encoder."""
        return cls.build_stack(parts, cls.encoder_layer, parts.config.num_hidden_layers)

    @classmethod
    def decoder_stack(cls, parts: Parts) -> Any:
        """Create the layers of the decoder."""
        return cls.build_stack(parts, cls.decoder_layer, parts.config.num_decoder_layers)

    @staticmethod
    def build_stack(parts: Parts, layer: MakePart, depth: int) -> Any:
        """Create layers, and the parts before and after them."""
        return LayerStack(parts, layer, depth)

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Run the encoder.

        Args:
            inputs: the arrays of `encoder_inputs`; or `encoder_outputs`, [b, t, d], which are
                returned as they are.
            key: dropout key; None = deterministic.
        """
        if "encoder_outputs" in inputs:
            x = inputs["encoder_outputs"]
            return Encoded(x, jnp.ones(x.shape[:2], jnp.int32))
        if key is not None:
            key = jax.random.fold_in(key, zlib.crc32(b"encoder"))
        with native.chosen_by(self.config):
            x, masks = self.encoder_inputs(inputs, key)
            b, t, _ = x.shape
            config = self.encoder_config
            ctx, _ = layer_context(config, (b, t), key=key, ropes=self.ropes, **masks)
            x, *_ = self.encoder(x, ctx, None)
        assert ctx.mask_info is not None
        return Encoded(x, ctx.mask_info.q_segment_ids)

    def encoder_inputs(
        self, inputs: Inputs, key: jax.Array | None
    ) -> tuple[Float[Array, "b t d"], dict[str, Any]]:
        """Return the inputs of the encoder's first layer, and the masks of `layer_context`.

        The default embeds `input_ids`, and reads `attention_mask` and `segment_ids`. `key` is the
        key of random masks in training.
        """
        embed = getattr(self, "encoder_embed_tokens", self.embed_tokens)
        masks = {name: inputs.get(name) for name in ("attention_mask", "segment_ids")}
        return embed(inputs["input_ids"]) * self.encoder_embed_scale, masks

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        encoded: Encoded | None = None,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        past_key_values: ContiguousCache | None = None,
        output_hidden_states: bool = False,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the decoder.

        Args:
            input_ids: token ids of the decoder [b, s], or `inputs_embeds` [b, s, d] instead.
            encoded: the encoder output; None if the cache contains its keys and values.
            past_key_values: a cache; None in training.
            output_hidden_states: also return the input of every layer and the last hidden state.
            inputs: `attention_mask`, `segment_ids`, `position_ids`, `mask_info`, `ragged` and
                `key`; see `CausalLM.__call__`.
        """
        x = embed_input_ids(self.embed_tokens, input_ids, inputs_embeds)
        x = x * self.embed_scale if inputs_embeds is None else x
        b, s, _ = x.shape
        ctx, cache = layer_context(
            self.decoder_config, (b, s), cache=past_key_values, ropes=self.ropes, **inputs
        )
        ctx = replace(ctx, encoded=encoded)
        with native.chosen_by(self.config):
            x, cache, report, hidden = self.decoder(x, ctx, cache, keep_hidden=output_hidden_states)
        if cache is not None and ctx.ragged is None:
            cache = cache.advance(s)
        return BaseModelOutput(
            last_hidden_state=name_activation(x, "model_output"),
            past_key_values=cache,
            hidden_states=hidden,
            losses=report.losses,
            aux=report.metrics,
            updates=report.under("decoder/layers").updates,
        )

    def write_encoded(
        self, cache: HybridCache, encoded: Encoded, slot: int | Int[Array, ""]
    ) -> HybridCache:
        """Write the cross-attention keys and values of one encoder output to a serving cache.

        Args:
            cache: a cache of `init_paged_cache(..., encoder_length=)`.
            encoded: the encoder output of one sequence, b = 1.
            slot: the slot of the sequence, as in `RaggedBatch.state_slots`.
        """

        def write(layer: Any, cache: HybridCache, index: Any) -> HybridCache:
            return layer.cross_attn.write(encoded, cache, index, slot)

        return self.decoder.layers.fold(write, cache)

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each decoder layer."""
        return self.decoder.layers.cache_specs()
