"""Qwen3.5 with experts, text (Qwen Team 2026): the layers of Qwen3.5, experts in all of them.

- three layers of the gated delta rule, then one of attention with a gate on its outputs
- the softmax weights of the chosen experts add up to one; a shared expert has a gate
- norms store `weight - 1`

Numbers follow Hugging Face's `modeling_qwen3_5_moe.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.experts import qwen_experts
from ed_models.body.gated_delta import SPLIT_DELTA, GatedHybrid, GatedHybridLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, renamed


@register_config("qwen3_5_moe_text")
class Qwen3_5MoeTextConfig(EasyDeLBaseConfig, transformers.Qwen3_5MoeTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_moe_text"


class Qwen3_5MoeDecoderLayer(GatedHybridLayer):
    """The delta rule or attention, then experts."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, index, qwen_experts(parts))


class Qwen3_5MoeTextModel(GatedHybrid):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3_5MoeTextConfig
    layer_class = Qwen3_5MoeDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen3_5MoeTextConfig, model_type="qwen3_5_moe_text")
class Qwen3_5MoeForCausalLM(CausalLM):
    """Qwen3.5 with experts and a language-model head."""

    body_class = Qwen3_5MoeTextModel
    WEIGHTS = renamed({"shared_experts": "shared_expert"}, EXPERTS, *SPLIT_DELTA)
    OTHER_NAMES = {"model.language_model": "model"}  # of a checkpoint that sees images too
    CONFORMANCE = {
        "two value heads for a key head": {
            "rms_norm_eps": 0.5,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "intermediate_size": None,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        "two of four, biases": {
            "rms_norm_eps": 0.5,
            "intermediate_size": None,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 8,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 16,
        },
    }
