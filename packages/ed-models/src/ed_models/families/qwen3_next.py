"""Qwen3-Next (Qwen Team 2025): three layers of the gated delta rule, then one of attention.

- the delta rule has several value heads for a key head, and a decay of each value head
- a quarter of each attention head turns; the outputs of attention have a gate
- norms store `weight - 1`
- experts as in Qwen2-MoE, one of which all tokens share, with a gate

Numbers follow Hugging Face's `modeling_qwen3_next.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.experts import has_experts, qwen_experts
from ed_models.body.gated_delta import GATED_DELTA, GatedHybrid, GatedHybridLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, fused, renamed


@register_config("qwen3_next")
class Qwen3NextConfig(EasyDeLBaseConfig, transformers.Qwen3NextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_next"


class Qwen3NextDecoderLayer(GatedHybridLayer):
    """The delta rule or attention, then experts."""

    def __init__(self, parts: Parts, index: int):
        sparse = has_experts(parts.config, index)
        super().__init__(parts, index, qwen_experts(parts) if sparse else GatedMLP(parts))


class Qwen3NextModel(GatedHybrid):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3NextConfig
    layer_class = Qwen3NextDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [(kind, has_experts(config, i)) for i, kind in enumerate(config.layer_types)]


@register_module(TaskType.CAUSAL_LM, config=Qwen3NextConfig, model_type="qwen3_next")
class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next with a language-model head."""

    body_class = Qwen3NextModel
    WEIGHTS = renamed(
        {"shared_experts": "shared_expert"},
        EXPERTS,
        *fused(
            tuple(f"linear_attn.{name}_proj" for name in "qkvg"),
            "linear_attn.in_proj_qkvz",
            groups="linear_num_key_heads",
        ),
        *fused(
            ("linear_attn.b_proj", "linear_attn.a_proj"),
            "linear_attn.in_proj_ba",
            groups="linear_num_key_heads",
        ),
        *GATED_DELTA,
    )
