"""Hunyuan dense (Tencent 2025): Llama with queries and keys normed after their positions.

- each query and key head is RMS-normed after rotary positions, not before

Numbers follow Hugging Face's `modeling_hunyuan_v1_dense.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, equal


@register_config("hunyuan_v1_dense")
class HunYuanDenseV1Config(EasyDeLBaseConfig, transformers.HunYuanDenseV1Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "hunyuan_v1_dense"


class HunYuanDenseV1DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: HunYuanDenseV1Config = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, norm=QKNorm(parts.norm, last=True)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class HunYuanDenseV1Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = HunYuanDenseV1Config
    layer_class = HunYuanDenseV1DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=HunYuanDenseV1Config, model_type="hunyuan_v1_dense")
class HunYuanDenseV1ForCausalLM(CausalLM):
    """HunYuanDenseV1 with a language-model head."""

    body_class = HunYuanDenseV1Model
    WEIGHTS = (
        Rule("{path}.q_norm.weight", "{path}.query_layernorm.weight", equal),
        Rule("{path}.k_norm.weight", "{path}.key_layernorm.weight", equal),
        *STANDARD,
    )
