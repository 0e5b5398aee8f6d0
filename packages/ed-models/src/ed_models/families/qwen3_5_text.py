"""Qwen3.5 (Qwen Team 2026): the layers of Qwen3-Next without experts.

- three layers of the gated delta rule, then one of attention with a gate on its outputs
- the projections of the delta rule are separate tensors in the checkpoint
- norms store `weight - 1`; a quarter of each attention head turns, in sections of time, height and
  width where positions have these axes
- the whole model has the vision tower of Qwen3-VL, without features of further layers

Numbers follow Hugging Face's `modeling_qwen3_5.py`; parameter names are its names. Layers that
predict further tokens are copied, not computed.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig as _Vision

from ed_models.body.gated_delta import SPLIT_DELTA, AxialHybrid, GatedHybridLayer
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.patch_tower import PatchTower, deep_tower
from ed_models.body.patch_weights import NESTED, NESTED_NAMES, patch_weights
from ed_models.modalities.videos import FRAMES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, carry


@register_config("qwen3_5_text")
class Qwen3_5TextConfig(EasyDeLBaseConfig, transformers.Qwen3_5TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_text"


class Qwen3_5VisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_vision"


@register_config("qwen3_5")
class Qwen3_5Config(EasyDeLBaseConfig, transformers.Qwen3_5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5"
    nested_configs = {"vision_config": Qwen3_5VisionConfig}


class Qwen3_5DecoderLayer(GatedHybridLayer):
    """The delta rule or attention, then a feed-forward layer."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, index, GatedMLP(parts))


class Qwen3_5TextModel(AxialHybrid):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3_5TextConfig
    layer_class = Qwen3_5DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen3_5TextConfig, model_type="qwen3_5_text")
class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5 with a language-model head."""

    body_class = Qwen3_5TextModel
    WEIGHTS = (*SPLIT_DELTA, carry("model.visual.{path}"))


class Qwen3_5Model(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Qwen3_5Config

    def tower(self, parts: Parts) -> PatchTower:
        return deep_tower(parts)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Qwen3_5Config, model_type="qwen3_5")
class Qwen3_5ForConditionalGeneration(ConditionalLM):
    """Qwen3.5 with a language-model head."""

    body_class = Qwen3_5Model
    modality = FRAMES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = patch_weights(NESTED_NAMES, text=SPLIT_DELTA, stored=NESTED)
