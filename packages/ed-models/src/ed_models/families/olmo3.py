"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows.

- three layers with a window, then one without; each kind may have separate rotary parameters
- attention and feed-forward are normed after; queries and keys over all heads together

Numbers follow Hugging Face's `modeling_olmo3.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import PostNormLayer, get_layer_window, rope_kind
from ed_models.tasks.causal_lm import CausalLM


@register_config("olmo3")
class Olmo3Config(EasyDeLBaseConfig, transformers.Olmo3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "olmo3"


class Olmo3DecoderLayer(PostNormLayer):
    """Attention and feed-forward, each normed after."""

    def __init__(self, parts: Parts, index: int):
        config: Olmo3Config = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.own_norm, heads="all"),
            position=Rotary(rope_kind(config, config.layer_types[index])),
            mask=MaskRule(window=get_layer_window(config, index)),
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Olmo3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Olmo3Config
    layer_class = Olmo3DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=Olmo3Config, model_type="olmo3")
class Olmo3ForCausalLM(CausalLM):
    """Olmo3 with a language-model head."""

    body_class = Olmo3Model
