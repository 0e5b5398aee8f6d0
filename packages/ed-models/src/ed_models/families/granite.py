"""Granite 3 (IBM 2024): Llama with multipliers.

- embeddings, attention scores, residual branches and logits have a factor each

Numbers follow Hugging Face's `modeling_granite.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("granite")
class GraniteConfig(EasyDeLBaseConfig, transformers.GraniteConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "granite"


class GraniteDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before, scaled, and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GraniteConfig = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, scores=ScoreRule(scale=config.attention_multiplier)
        )
        super().__init__(
            parts,
            self_attn=attention,
            mlp=GatedMLP(parts, bias=config.mlp_bias),
            factor=config.residual_multiplier,
        )


class GraniteModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GraniteConfig
    layer_class = GraniteDecoderLayer

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier


@register_module(TaskType.CAUSAL_LM, config=GraniteConfig, model_type="granite")
class GraniteForCausalLM(CausalLM):
    """Granite with a language-model head."""

    body_class = GraniteModel

    def head(self):
        return replace(super().head(), scale=1 / self.config.logits_scaling)
