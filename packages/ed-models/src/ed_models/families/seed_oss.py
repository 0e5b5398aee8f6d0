"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values.

- `attention_bias` for queries, keys and values, `attention_out_bias` for the output projection
- `mlp_bias`; `head_dim` is independent of the hidden size

Numbers follow Hugging Face's `modeling_seed_oss.py`; parameter names are its names.
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


@register_config("seed_oss")
class SeedOssConfig(EasyDeLBaseConfig, transformers.SeedOssConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "seed_oss"


class SeedOssDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: SeedOssConfig = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, out_bias=config.attention_out_bias
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts, bias=config.mlp_bias))


class SeedOssModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = SeedOssConfig
    layer_class = SeedOssDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=SeedOssConfig, model_type="seed_oss")
class SeedOssForCausalLM(CausalLM):
    """SeedOss with a language-model head."""

    body_class = SeedOssModel
