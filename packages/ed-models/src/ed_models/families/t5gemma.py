"""T5Gemma (Zhang et al. 2025): an encoder-decoder of two Gemma 2 models.

- encoder and decoder have their own configurations, sizes and embeddings
- attention and feed-forward are normed before and after; every other layer sees a window
- scores and logits are soft-capped (`attn_logit_softcapping`, `final_logit_softcapping`)

Numbers and parameter names follow Hugging Face's `modeling_t5gemma.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import MakePart, Parts
from transformers import T5GemmaModuleConfig

from ed_models.body.encoder_decoder import EncoderDecoder, LayerStack, SandwichCrossLayer
from ed_models.body.layers import SandwichLayer, get_layer_window
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.weights.rules import STANDARD, renamed


class T5GemmaSideConfig(EasyDeLBaseConfig, T5GemmaModuleConfig):
    """The configuration of the encoder or of the decoder."""

    model_type = "t5_gemma_module"
    # Fields that `transformers` sets without declaring them.
    known_keywords = frozenset({"dropout_rate", "cross_attention_hidden_size"})


@register_config("t5gemma")
class T5GemmaConfig(EasyDeLBaseConfig, transformers.T5GemmaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `encoder` and `decoder`.
    """

    model_type = "t5gemma"
    encoder: Any = None
    decoder: Any = None
    nested_configs = {"encoder": T5GemmaSideConfig, "decoder": T5GemmaSideConfig}


def attention_settings(config: T5GemmaSideConfig) -> dict[str, Any]:
    """Return the arguments that self-attention and cross-attention share."""
    scale, cap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
    return {"bias": config.attention_bias, "scores": ScoreRule(scale=scale, soft_cap=cap)}


def feed_forward(parts: Parts) -> GatedMLP:
    """Create the feed-forward layer."""
    config = parts.config
    return GatedMLP(parts, hidden_act=config.hidden_activation, dropout=config.dropout_rate)


def _encoder_layer(parts: Parts, index: int) -> SandwichLayer:
    """Create a layer of the encoder."""
    config = parts.config
    window = get_layer_window(config, index)
    # Hugging Face counts the tokens on one side of a bidirectional window.
    mask = MaskRule(causal=False, window=None if window is None else window + 1)
    return SandwichLayer(
        parts,
        self_attn=SelfAttention(parts, mask=mask, **attention_settings(config)),
        mlp=feed_forward(parts),
        dropout=config.dropout_rate,
    )


def _decoder_layer(parts: Parts, index: int, encoder_size: int) -> SandwichCrossLayer:
    """Create a layer of the decoder."""
    config = parts.config
    shared = attention_settings(config)
    return SandwichCrossLayer(
        parts,
        self_attn=SelfAttention(
            parts, mask=MaskRule(window=get_layer_window(config, index)), **shared
        ),
        cross_attn=CrossAttention(parts, encoder_size=encoder_size, **shared),
        mlp=feed_forward(parts),
        dropout=config.dropout_rate,
    )


def _layer_stack(parts: Parts, config: T5GemmaSideConfig, layer: MakePart) -> LayerStack:
    """Create the layers and the last norm of the encoder or of the decoder."""
    parts = replace(parts, config=config)
    parts = replace(parts, norm_of_family=partial(parts.norm, offset=1.0, scale_first=True))
    kinds, dropout = config.layer_types, config.dropout_rate
    return LayerStack(parts, layer, config.num_hidden_layers, kinds=kinds, dropout=dropout)


class T5GemmaModel(EncoderDecoder):
    """Embeddings, encoder, decoder."""

    config_class = T5GemmaConfig
    ropes = None

    @property
    def encoder_config(self):
        return self.config.encoder

    @property
    def decoder_config(self):
        return self.config.decoder

    @property
    def embed_scale(self):
        return self.config.decoder.hidden_size**0.5

    @property
    def encoder_embed_scale(self):
        return self.config.encoder.hidden_size**0.5

    def add_embeddings(self, parts):
        for name, side in (
            ("encoder_embed_tokens", parts.config.encoder),
            ("embed_tokens", parts.config.decoder),
        ):
            table = parts.embed(side.vocab_size, side.hidden_size, padding=side.pad_token_id)
            setattr(self, name, table)

    @classmethod
    def encoder_stack(cls, parts):
        return _layer_stack(parts, parts.config.encoder, _encoder_layer)

    @classmethod
    def decoder_stack(cls, parts):
        layer = partial(_decoder_layer, encoder_size=parts.config.encoder.hidden_size)
        return _layer_stack(parts, parts.config.decoder, layer)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=T5GemmaConfig, model_type="t5gemma")
class T5GemmaForConditionalGeneration(Seq2SeqLM):
    """T5Gemma with a language-model head."""

    body_class = T5GemmaModel
    WEIGHTS = renamed(
        {
            "model.encoder_embed_tokens": "model.encoder.embed_tokens",
            "model.embed_tokens": "model.decoder.embed_tokens",
            "lm_head": "lm_head.out_proj",
            "input_layernorm": "pre_self_attn_layernorm",
            "post_attention_layernorm": "post_self_attn_layernorm",
        },
        *STANDARD,
    )

    def head(self):
        return replace(super().head(), soft_cap=self.config.decoder.final_logit_softcapping)

    def first_tokens(self, tokens):
        return jnp.full_like(tokens[:, :1], self.config.decoder.bos_token_id)
