"""LLaVA-NeXT (Liu et al. 2024) and the images of LLaVA-NeXT-Video: tiles of an image.

- an image is the whole image in the size of a tile, and a grid of tiles without padding
- a trained feature ends each row of the grid

The numbers follow Hugging Face's `modeling_llava_next.py` and `modeling_llava_next_video.py`. Of
LLaVA-NeXT-Video, images are supported, and videos are not.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.sized_tiles import SIZED_TILE_NAMES, SIZED_TILE_RULES, SizedImageTextModel
from ed_models.body.tiles import TILED_MODULES
from ed_models.body.unpadded import TileGrids
from ed_models.modalities.images import GRID_TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("llava_next")
class LlavaNextConfig(EasyDeLBaseConfig, transformers.LlavaNextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava_next"


@register_config("llava_next_video")
class LlavaNextVideoConfig(EasyDeLBaseConfig, transformers.LlavaNextVideoConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava_next_video"


class LlavaNextModel(SizedImageTextModel):
    """Vision tower, projector, the feature that ends a row, and decoder."""

    config_class = LlavaNextConfig

    @property
    def grids(self) -> TileGrids:
        """The grids into which images are split."""
        config = self.config
        vision = config.vision_config
        return TileGrids.of(config.image_grid_pinpoints, vision.image_size, vision.patch_size)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaNextConfig, model_type="llava_next")
class LlavaNextForConditionalGeneration(ConditionalLM):
    """LLaVA-NeXT with a language-model head."""

    body_class = LlavaNextModel
    modality = GRID_TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = SIZED_TILE_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = SIZED_TILE_RULES


class LlavaNextVideoModel(LlavaNextModel):
    """Vision tower, projector, the feature that ends a row, and decoder."""

    config_class = LlavaNextVideoConfig


@register_module(
    TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaNextVideoConfig, model_type="llava_next_video"
)
class LlavaNextVideoForConditionalGeneration(ConditionalLM):
    """LLaVA-NeXT-Video with a language-model head."""

    body_class = LlavaNextVideoModel
    modality = GRID_TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = SIZED_TILE_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = SIZED_TILE_RULES
