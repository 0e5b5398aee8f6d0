"""Cohere Command R7B and A (Cohere 2025): Command R with windows.

- three layers with a window and rotary positions, then one without either
- attention and feed-forward side by side behind one layer norm without bias
- rotary pairs are neighbours; logits are multiplied by `logit_scale`

Numbers follow Hugging Face's `modeling_cohere2.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import ParallelLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("cohere2")
class Cohere2Config(EasyDeLBaseConfig, transformers.Cohere2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "cohere2"


class Cohere2DecoderLayer(ParallelLayer):
    """Attention and feed-forward side by side behind one norm."""

    def __init__(self, parts: Parts, index: int):
        config: Cohere2Config = parts.config
        window = get_layer_window(config, index)
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            position=None if window is None else Rotary(interleaved=True),
            mask=MaskRule(window=window),
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Cohere2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Cohere2Config
    layer_class = Cohere2DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps, bias=False)


@register_module(TaskType.CAUSAL_LM, config=Cohere2Config, model_type="cohere2")
class Cohere2ForCausalLM(CausalLM):
    """Cohere2 with a language-model head."""

    body_class = Cohere2Model

    def head(self):
        return replace(super().head(), scale=self.config.logit_scale)
