"""Command A Vision (Cohere 2025): a SigLIP tower over tiles, a gated projector, and Cohere 2.

- an image is a grid of tiles and the whole image in the size of a tile
- squares of `downsample_factor` x `downsample_factor` patches become one feature
- the projector reads the normed output of the tower; it has no norm

The numbers follow Hugging Face's `modeling_cohere2_vision.py`; parameter names are its
names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.tiles import SquaresProjector, TiledImageTextModel
from ed_models.body.vision import tower_rules
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD


@register_config("cohere2_vision")
class Cohere2VisionConfig(EasyDeLBaseConfig, transformers.Cohere2VisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "cohere2_vision"


class Cohere2VisionModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = Cohere2VisionConfig
    projector_class = SquaresProjector


@register_module(
    TaskType.IMAGE_TEXT_TO_TEXT, config=Cohere2VisionConfig, model_type="cohere2_vision"
)
class Cohere2VisionForConditionalGeneration(ConditionalLM):
    """Command A Vision with a language-model head, whose logits are not scaled."""

    body_class = Cohere2VisionModel
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    # Older releases of transformers name the tower inside a module of the tower.
    OTHER_NAMES = {"vision_tower.vision_model": "vision_tower"}
    WEIGHTS = (*tower_rules("model.vision_tower", "model.vision_tower"), *STANDARD)
