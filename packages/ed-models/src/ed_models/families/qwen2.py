"""Qwen2 and Qwen2.5 (Qwen Team 2024): Llama with biases on queries, keys and values.

- no bias on the output projection and in the feed-forward
- layers of type `sliding_attention` see a window (`use_sliding_window`, `max_window_layers`)

Numbers follow Hugging Face's `modeling_qwen2.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("qwen2")
class Qwen2Config(EasyDeLBaseConfig, transformers.Qwen2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2"


class Qwen2DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen2Config = parts.config
        attention = SelfAttention(
            parts, bias=True, out_bias=False, mask=MaskRule(window=get_layer_window(config, index))
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Qwen2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen2Config
    layer_class = Qwen2DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen2Config, model_type="qwen2")
class Qwen2ForCausalLM(CausalLM):
    """Qwen2 with a language-model head."""

    body_class = Qwen2Model
