"""Qwen3.5 with experts (Qwen Team 2026): the layers of Qwen3.5, experts in all of them.

- three layers of the gated delta rule, then one of attention with a gate on its outputs
- the softmax weights of the chosen experts add up to one; a shared expert has a gate
- norms store `weight - 1`
- the whole model has the vision tower of Qwen3-VL, without features of further layers

Numbers follow Hugging Face's `modeling_qwen3_5_moe.py`; parameter names are its names. Layers that
predict further tokens are copied, not computed.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeVisionConfig as _Vision,
)

from ed_models.body.experts import qwen_experts
from ed_models.body.gated_delta import SPLIT_DELTA_EXPERTS, AxialHybrid, GatedHybridLayer
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.joined_experts import locate_experts, separate_experts
from ed_models.body.patch_tower import PatchTower, deep_tower
from ed_models.body.patch_weights import NESTED, NESTED_NAMES, patch_weights
from ed_models.modalities.videos import FRAMES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, carry


@register_config("qwen3_5_moe_text")
class Qwen3_5MoeTextConfig(EasyDeLBaseConfig, transformers.Qwen3_5MoeTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_moe_text"


class Qwen3_5MoeVisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_moe_vision"


@register_config("qwen3_5_moe")
class Qwen3_5MoeConfig(EasyDeLBaseConfig, transformers.Qwen3_5MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_moe"
    nested_configs = {"vision_config": Qwen3_5MoeVisionConfig}


class Qwen3_5MoeDecoderLayer(GatedHybridLayer):
    """The delta rule or attention, then experts."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, index, qwen_experts(parts))


class Qwen3_5MoeTextModel(AxialHybrid):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3_5MoeTextConfig
    layer_class = Qwen3_5MoeDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen3_5MoeTextConfig, model_type="qwen3_5_moe_text")
class Qwen3_5MoeForCausalLM(CausalLM):
    """Qwen3.5 with experts and a language-model head."""

    body_class = Qwen3_5MoeTextModel
    WEIGHTS = (*SPLIT_DELTA_EXPERTS, carry("model.visual.{path}"))
    as_published = staticmethod(separate_experts)
    locate_parts = staticmethod(locate_experts)


class Qwen3_5MoeModel(PatchedImageTextModel):
    """Vision tower and decoder with experts."""

    config_class = Qwen3_5MoeConfig

    def tower(self, parts: Parts) -> PatchTower:
        return deep_tower(parts)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Qwen3_5MoeConfig, model_type="qwen3_5_moe")
class Qwen3_5MoeForConditionalGeneration(ConditionalLM):
    """Qwen3.5 with experts and a language-model head."""

    body_class = Qwen3_5MoeModel
    modality = FRAMES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = patch_weights(NESTED_NAMES, text=SPLIT_DELTA_EXPERTS, stored=NESTED)
    as_published = staticmethod(separate_experts)
    locate_parts = staticmethod(locate_experts)
