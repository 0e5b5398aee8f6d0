"""SmolLM3 (Hugging Face 2025): Llama in which every fourth layer has no positions.

- `no_rope_layers` selects the layers that rotate queries and keys (1)
- layers of type `sliding_attention` see a window where `use_sliding_window` is set

Numbers follow Hugging Face's `modeling_smollm3.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("smollm3")
class SmolLM3Config(EasyDeLBaseConfig, transformers.SmolLM3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "smollm3"


class SmolLM3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: SmolLM3Config = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            position=Rotary() if config.no_rope_layers[index] else None,
            mask=MaskRule(window=get_layer_window(config, index)),
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts, bias=config.mlp_bias))


class SmolLM3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = SmolLM3Config
    layer_class = SmolLM3DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.no_rope_layers, strict=False))


@register_module(TaskType.CAUSAL_LM, config=SmolLM3Config, model_type="smollm3")
class SmolLM3ForCausalLM(CausalLM):
    """SmolLM3 with a language-model head."""

    body_class = SmolLM3Model
