"""Helium (Kyutai 2025): Llama whose rotary pairs are adjacent elements.

- norms scale in float32

Numbers follow Hugging Face's `modeling_helium.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("helium")
class HeliumConfig(EasyDeLBaseConfig, transformers.HeliumConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "helium"


class HeliumDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: HeliumConfig = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, out_bias=False, position=Rotary(interleaved=True)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts, bias=config.mlp_bias))


class HeliumModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = HeliumConfig
    layer_class = HeliumDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=HeliumConfig, model_type="helium")
class HeliumForCausalLM(CausalLM):
    """Helium with a language-model head."""

    body_class = HeliumModel
