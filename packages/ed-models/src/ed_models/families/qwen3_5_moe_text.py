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
