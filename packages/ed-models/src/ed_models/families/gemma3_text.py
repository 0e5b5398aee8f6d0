"""Gemma 3, text (Gemma Team 2025): Gemma 2 with normed queries and keys, without soft caps.

- five layers with a window, then one without; each kind has separate rotary parameters
- query and key heads are RMS-normed
- attention and feed-forward are normed before and after

Numbers follow Hugging Face's `modeling_gemma3.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import ScaledDecoder
from ed_models.body.layers import SandwichLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("gemma3_text")
class Gemma3Config(EasyDeLBaseConfig, transformers.Gemma3TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gemma3_text"


class Gemma3DecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: Gemma3Config = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.own_norm),
            position=Rotary(config.layer_types[index]),
            mask=MaskRule(window=get_layer_window(config, index)),
            scores=ScoreRule(
                soft_cap=config.attn_logit_softcapping, scale=config.query_pre_attn_scalar**-0.5
            ),
        )
        super().__init__(
            parts,
            self_attn=attention,
            mlp=GatedMLP(parts, hidden_act=config.hidden_activation),
        )


class Gemma3Model(ScaledDecoder):
    """Embedding, decoder layers, final norm."""

    config_class = Gemma3Config
    layer_class = Gemma3DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, offset=1.0, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=Gemma3Config, model_type="gemma3_text")
class Gemma3ForCausalLM(CausalLM):
    """Gemma3 with a language-model head."""

    body_class = Gemma3Model

    def head(self):
        return replace(super().head(), soft_cap=self.config.final_logit_softcapping)
