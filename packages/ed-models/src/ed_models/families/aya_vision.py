"""Aya Vision (Cohere 2025): a SigLIP vision tower over tiles, a gated projector, and Cohere 2.

- an image is a grid of tiles and the whole image in the size of a tile
- squares of `downsample_factor` x `downsample_factor` patches become one feature

The numbers follow Hugging Face's `modeling_aya_vision.py`.

Legend: t tiles, c channels, h height, w width, n features of a tile, d hidden size of the text.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from jaxtyping import Array, Float

from ed_models.body.tiles import (
    TILED_MODULES,
    TILED_NAMES,
    TILED_WEIGHTS,
    SquaresProjector,
    TiledImageTextModel,
)
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("aya_vision")
class AyaVisionConfig(EasyDeLBaseConfig, transformers.AyaVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "aya_vision"


class AyaVisionProjector(SquaresProjector):
    """A norm of the squares, and the gated projector."""

    def __init__(self, parts: Parts):
        super().__init__(parts)
        self.layernorm = parts.layer_norm(self.inputs, eps=parts.config.adapter_layer_norm_eps)


class AyaVisionModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = AyaVisionConfig
    projector_class = AyaVisionProjector

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **extra_inputs: Array
    ) -> Float[Array, "t n d"]:
        """Return the features of tiles."""
        return self.multi_modal_projector(self.select_hidden_states(pixel_values))


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=AyaVisionConfig, model_type="aya_vision")
class AyaVisionForConditionalGeneration(ConditionalLM):
    """Aya Vision with a language-model head, whose logits are not scaled."""

    body_class = AyaVisionModel
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = TILED_WEIGHTS
