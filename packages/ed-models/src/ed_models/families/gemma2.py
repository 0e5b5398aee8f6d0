"""Gemma 2 (Gemma Team 2024): Gemma with soft caps, windows and norms on both sides.

- attention and feed-forward are normed before and after
- scores and logits are soft-capped (`attn_logit_softcapping`, `final_logit_softcapping`)
- scores are scaled by `query_pre_attn_scalar ** -0.5`
- every other layer sees a window

Numbers follow Hugging Face's `modeling_gemma2.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import ScaledDecoder
from ed_models.body.layers import SandwichLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("gemma2")
class Gemma2Config(EasyDeLBaseConfig, transformers.Gemma2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gemma2"


class Gemma2DecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: Gemma2Config = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
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


class Gemma2Model(ScaledDecoder):
    """Embedding, decoder layers, final norm."""

    config_class = Gemma2Config
    layer_class = Gemma2DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, offset=1.0, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=Gemma2Config, model_type="gemma2")
class Gemma2ForCausalLM(CausalLM):
    """Gemma2 with a language-model head."""

    body_class = Gemma2Model

    def head(self):
        return replace(super().head(), soft_cap=self.config.final_logit_softcapping)
