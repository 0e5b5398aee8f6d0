"""Qwen3 (Qwen Team 2025): Llama's layer with normed queries and keys.

- each query and key head is RMS-normed before the rotary positions
- `head_dim` is a separate field, not hidden size over heads
- biases of the attention projections by `attention_bias`; none in the feed-forward
- layers of type `sliding_attention` see a window (`use_sliding_window`, `max_window_layers`)

Numbers follow Hugging Face's `modeling_qwen3.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("qwen3")
class Qwen3Config(EasyDeLBaseConfig, transformers.Qwen3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3"


class Qwen3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen3Config = parts.config
        slides = config.layer_types[index] == "sliding_attention"
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.norm),
            mask=MaskRule(window=config.sliding_window if slides else None),
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Qwen3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3Config
    layer_class = Qwen3DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen3Config, model_type="qwen3")
class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with a language-model head."""

    body_class = Qwen3Model
