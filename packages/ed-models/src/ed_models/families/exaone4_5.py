"""EXAONE 4.5 (LG AI Research 2026): the vision tower of Qwen2.5-VL, and EXAONE 4.

- several heads of queries of the tower share a key and a value
- text has the positions of texts
- layers that predict further tokens (`mtp`) are copied from checkpoint to checkpoint

Numbers follow Hugging Face's `modeling_exaone4_5.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from transformers.models.exaone4_5.configuration_exaone4_5 import Exaone4_5_Config as _Config
from transformers.models.exaone4_5.configuration_exaone4_5 import Exaone4_5_VisionConfig as _Vision

from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.packed_images import PatchForm
from ed_models.body.patch_tower import PatchTower, windowed_tower
from ed_models.body.patch_weights import MERGER, NESTED, patch_weights
from ed_models.modalities.images import PATCHES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, carry


class Exaone4_5VisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "exaone4_5_vision"


@register_config("exaone4_5")
class Exaone4_5Config(EasyDeLBaseConfig, _Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "exaone4_5"
    nested_configs = {"vision_config": Exaone4_5VisionConfig}


class Exaone4_5Model(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Exaone4_5Config

    def tower(self, parts: Parts) -> PatchTower:
        return windowed_tower(parts)

    @property
    def patch_form(self) -> PatchForm:
        """The patches that the tower reads."""
        return replace(super().patch_form, has_axes=False)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Exaone4_5Config, model_type="exaone4_5")
class Exaone4_5ForConditionalGeneration(ConditionalLM):
    """EXAONE 4.5 with a language-model head."""

    body_class = Exaone4_5Model
    architecture = "Exaone4_5_ForConditionalGeneration"
    modality = PATCHES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = (*patch_weights(MERGER, stored=NESTED), carry("mtp.{path}"))
