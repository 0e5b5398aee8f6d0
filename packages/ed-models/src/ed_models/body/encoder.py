"""The body of bidirectional encoders: embeddings of tokens, positions and token types, layers.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.outputs import BaseModelOutput
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Position
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.context import embed_input_ids
from ed_models.body.decoder import Decoder
from ed_models.body.layers import Attention, DecoderLayer, FeedForward

#: A layer of an encoder attends to all tokens of its segment.
BIDIRECTIONAL = MaskRule(causal=False)


class EncoderLayer(DecoderLayer):
    """Bidirectional attention and feed-forward, with a norm after each addition (BERT).

    Args:
        parts: creates the parts.
        index: number of the layer.
        position: the position encoding of the attention; None = positions are embedded.
        self_attn, mlp: attention and feed-forward; default: with biases, without a gate.
    """

    def __init__(
        self,
        parts: Parts,
        index: int,
        *,
        position: Position = None,
        self_attn: Attention | None = None,
        mlp: FeedForward | None = None,
    ):
        if self_attn is None:
            self_attn = SelfAttention(parts, bias=True, position=position, mask=BIDIRECTIONAL)
        rate = parts.config.hidden_dropout_prob
        super().__init__(parts, self_attn=self_attn, mlp=mlp or MLP(parts), dropout=rate)

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(x, ctx, cache, layer)
        x = self.input_layernorm(x + ctx.apply_dropout(attended, self.dropout, "attention"))
        x = ctx.name_activation(x, "residual")
        out, report = self.feed_forward(x, ctx)
        x = x + ctx.apply_dropout(out, self.dropout, "mlp")
        return self.post_attention_layernorm(x), cache, report


class TextEncoder(Decoder):
    """Embeddings, bidirectional layers and, in a body of its own, a pooler.

    The configuration determines the parts: `type_vocab_size` token types (0 = none), and a
    projection if `embedding_size` differs from `hidden_size`.

    Attributes:
        pooler_activation: activation of the pooler, which `EncoderNames.pooled` sets; None = no
            pooler.
        projects_first: whether the projection of the embeddings precedes their norm, and has no
            bias (DeBERTa).
    """

    layer_class = EncoderLayer
    input_names = (*EasyDeLBaseModule.input_names, "token_type_ids")
    pooler_activation: ClassVar[str | None] = None
    projects_first: ClassVar[bool] = False

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)

    @staticmethod
    def final_norm(parts: Parts) -> nnx.Module | None:
        return None

    @staticmethod
    def embedding(parts):
        return parts.embed(parts.config.vocab_size, embedding_size(parts.config))

    @staticmethod
    def has_position_table(config: EasyDeLBaseConfig) -> bool:
        """Return whether the embedding has a table of positions."""
        return True

    @staticmethod
    def projects_embeddings(config: EasyDeLBaseConfig) -> bool:
        """Return whether a linear layer maps the embeddings to the hidden states."""
        return embedding_size(config) != config.hidden_size

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.config.hidden_size

    def add_parts(self, parts):
        config, d, e = parts.config, parts.config.hidden_size, embedding_size(parts.config)
        if self.has_position_table(config):
            self.embed_positions = parts.embed(config.max_position_embeddings, e)
        if getattr(config, "type_vocab_size", 0):
            self.embed_types = parts.embed(config.type_vocab_size, e)
        self.embed_norm = parts.own_norm(d if self.projects_first else e)
        if self.projects_embeddings(config):
            bias = not self.projects_first
            self.embed_proj = parts.linear(e, d, axes=(None, "embed"), bias=bias)
        if self.pooler_activation is not None:
            self.pooler = parts.linear(d, d, axes=("embed", None), bias=True)

    def enter(self, x, ctx):
        if hasattr(self, "embed_positions"):
            x = x + self.embed_positions(ctx.position_ids + first_position(self.config))
        project = self.embed_proj if hasattr(self, "embed_proj") else (lambda x, ctx: x)
        if self.projects_first:
            x = project(x, ctx)
        x = ctx.apply_dropout(self.embed_norm(x), self.config.hidden_dropout_prob, "embeddings")
        return x if self.projects_first else project(x, ctx)

    def check_length(self, length: int) -> None:
        """Raise ConfigError if a row of tokens is longer than the table of positions."""
        rows = self.config.max_position_embeddings - first_position(self.config)
        if hasattr(self, "embed_positions") and length > rows:
            raise ConfigError(
                f"a row has {length} tokens, but the model has positions for {rows}: truncate the "
                "text, or pass segment_ids if the row contains several texts"
            )

    def rope_settings(self):
        return {}

    def cache_specs(self):
        return EasyDeLBaseModule.cache_specs(self)

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s e"] | None = None,
        token_type_ids: Int[Array, "b s"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the encoder.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` instead: embeddings of the tokens,
                [b, s, e]; e is `embedding_size`, or d.
            token_type_ids: 0 for the first text of a pair, 1 for the second; default: 0.
            attention_mask: nonzero = a token, [b, s].
            inputs: `segment_ids`, `position_ids`, `key` and `output_hidden_states`; see
                `CausalLM.__call__`.

        Raises:
            ConfigError: a row is longer than the table of positions.
        """
        x = embed_input_ids(self.embed_tokens, input_ids, inputs_embeds)
        if inputs.get("segment_ids") is None and inputs.get("position_ids") is None:
            self.check_length(x.shape[1])
            if input_ids is not None and attention_mask is None:
                inputs["position_ids"] = count_tokens(input_ids, self.config)
        if hasattr(self, "embed_types"):
            types = jnp.zeros(x.shape[:2], jnp.int32) if token_type_ids is None else token_type_ids
            x = x + self.embed_types(types)
        output = super().__call__(inputs_embeds=x, attention_mask=attention_mask, **inputs)
        if self.pooler_activation is None:
            return output
        first = first_tokens(output.last_hidden_state, attention_mask)
        return output.replace(pooler_output=activation(self.pooler_activation)(self.pooler(first)))


def first_position(config: EasyDeLBaseConfig) -> int:
    """Return the row of the position table that belongs to the first token."""
    return getattr(config, "first_position", 0)


def count_tokens(
    input_ids: Int[Array, "b s"], config: EasyDeLBaseConfig
) -> Int[Array, "b s"] | None:
    """Return the positions of tokens that are not padding; None = all positions count.

    The first relatives of RoBERTa take positions from the token ids: padding has the position
    before the first token.
    """
    if not first_position(config) or config.pad_token_id is None:
        return None
    is_token = jnp.asarray(input_ids) != config.pad_token_id
    return jnp.where(is_token, jnp.cumsum(is_token, axis=1) - 1, -1)


def only_encoder(config: EasyDeLBaseConfig) -> None:
    """Raise ConfigError if a configuration describes a decoder."""
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(config, name):
            raise ConfigError(
                f"{config.model_type}: {name}=True is not supported, only encoders are"
            )


def embedding_size(config: EasyDeLBaseConfig) -> int:
    """Return the number of features of the embeddings."""
    return getattr(config, "embedding_size", None) or config.hidden_size


def first_tokens(
    hidden: Float[Array, "b s d"], attention_mask: Int[Array, "b s"] | None
) -> Float[Array, "b d"]:
    """Return the hidden state of the first token of each row."""
    if attention_mask is None:
        return hidden[:, 0]
    first = jnp.argmax(jnp.asarray(attention_mask) != 0, axis=1)
    return jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0]
