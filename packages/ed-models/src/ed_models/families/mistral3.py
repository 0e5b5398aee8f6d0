"""Mistral 3 (Mistral AI 2025): the vision tower of Pixtral, a projector, and Mistral.

- blocks of neighboring patches become one feature
- a token without a feature ends each row of features in the text

The numbers follow Hugging Face's `modeling_mistral3.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.image_text import MergingProjector, PackedImageTextModel
from ed_models.body.patch_weights import PACKED_WEIGHTS
from ed_models.body.tiles import TILED_MODULES, TILED_NAMES
from ed_models.modalities.images import ROWS
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, Rule, transpose


@register_config("mistral3")
class Mistral3Config(EasyDeLBaseConfig, transformers.Mistral3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "mistral3"


class Mistral3Projector(MergingProjector):
    """The projector of one layer of the tower."""

    def __init__(self, parts: Parts):
        config: Mistral3Config = parts.config
        if not isinstance(config.vision_feature_layer, int):
            raise ConfigError(
                f"vision_feature_layer={config.vision_feature_layer!r} is not supported: "
                "Mistral 3 reads one layer of the tower, such as -1"
            )
        super().__init__(
            parts, bias=config.multimodal_projector_bias, act=config.projector_hidden_act
        )


class Mistral3Model(PackedImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = Mistral3Config
    projector_class = Mistral3Projector


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Mistral3Config, model_type="mistral3")
class Mistral3ForConditionalGeneration(ConditionalLM):
    """Mistral 3 with a language-model head."""

    body_class = Mistral3Model
    modality = ROWS
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = (
        Rule(
            "model.multi_modal_projector.patch_merger.kernel",
            "multi_modal_projector.patch_merger.merging_layer.weight",
            transpose,
        ),
        *PACKED_WEIGHTS,
    )
