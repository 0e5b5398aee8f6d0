"""LightOnOCR (LightOn 2025): the vision tower of Pixtral, the projector of Mistral 3, and Qwen3.

- blocks of neighboring patches become one feature
- no token ends a row of features

The numbers follow Hugging Face's `modeling_lighton_ocr.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.image_text import MergingProjector, PackedImageTextModel
from ed_models.body.patch_weights import PIXTRAL
from ed_models.body.vision import tower_rules
from ed_models.modalities.images import ROWS
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD, Rule, renamed, transpose


@register_config("lighton_ocr")
class LightOnOcrConfig(EasyDeLBaseConfig, transformers.LightOnOcrConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "lighton_ocr"
    #: The projector reads the output of the last layer of the tower.
    vision_feature_layer = -1


class LightOnOcrModel(PackedImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = LightOnOcrConfig
    projector_class = MergingProjector
    ends_rows = False


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=LightOnOcrConfig, model_type="lighton_ocr")
class LightOnOcrForConditionalGeneration(ConditionalLM):
    """LightOnOCR with a language-model head."""

    body_class = LightOnOcrModel
    modality = ROWS
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = (
        *tower_rules("model.vision_tower", "model.vision_encoder", {}, PIXTRAL),
        *renamed(
            {"model.multi_modal_projector": "model.vision_projection"},
            Rule(
                "{path}.patch_merger.kernel", "{path}.patch_merger.merging_layer.weight", transpose
            ),
            *STANDARD,
        ),
    )
