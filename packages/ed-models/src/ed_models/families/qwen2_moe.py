"""Qwen1.5-MoE and Qwen2-MoE (Qwen Team 2024): Qwen2 with experts, one of which all tokens share.

- the output of the shared expert is multiplied by a separate gate
- the softmax weights of the chosen experts add up to one only if `norm_topk_prob` is set
- `decoder_sparse_step` and `mlp_only_layers` select the layers with experts

Numbers follow Hugging Face's `modeling_qwen2_moe.py`; parameter names are its names.
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
from ed_models.body.experts import has_experts, qwen_experts
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("qwen2_moe")
class Qwen2MoeConfig(EasyDeLBaseConfig, transformers.Qwen2MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_moe"


class Qwen2MoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen2MoeConfig = parts.config
        attention = SelfAttention(
            parts,
            bias=config.qkv_bias,
            out_bias=False,
            mask=MaskRule(window=get_layer_window(config, index)),
        )
        mlp = qwen_experts(parts) if has_experts(config, index) else GatedMLP(parts)
        super().__init__(parts, self_attn=attention, mlp=mlp)


class Qwen2MoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen2MoeConfig
    layer_class = Qwen2MoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [(kind, has_experts(config, i)) for i, kind in enumerate(config.layer_types)]


@register_module(TaskType.CAUSAL_LM, config=Qwen2MoeConfig, model_type="qwen2_moe")
class Qwen2MoeForCausalLM(CausalLM):
    """Qwen2-MoE with a language-model head."""

    body_class = Qwen2MoeModel
    WEIGHTS = renamed({"shared_experts": "shared_expert"}, EXPERTS, *STANDARD)
