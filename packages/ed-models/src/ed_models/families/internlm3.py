"""InternLM3 (Shanghai AI Laboratory 2025): Llama under another name.

- one switch for all biases (`qkv_bias` and `bias` are equal)

Hugging Face computes it by its `modeling_llama.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("internlm3")
class InternLM3Config(EasyDeLBaseConfig, transformers.InternLM3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "internlm3"


class InternLM3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: InternLM3Config = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
        )


class InternLM3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = InternLM3Config
    layer_class = InternLM3DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=InternLM3Config, model_type="internlm3")
class InternLM3ForCausalLM(CausalLM):
    """InternLM3 with a language-model head."""

    body_class = InternLM3Model
