"""LLaVA-OneVision (Li et al. 2024): LLaVA-NeXT with a SigLIP tower, for one or several images.

- a single image is the whole image in the size of a tile, and a grid of tiles without padding
- a grid with more features than those of `anyres_max_N` tiles is reduced
- each of several images of a prompt is one tile, without a grid
- a trained feature ends each row of a grid, and an image without a grid

The numbers follow Hugging Face's `modeling_llava_onevision.py`. Videos are not supported.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module

from ed_models.body.sized_tiles import SIZED_TILE_NAMES, SIZED_TILE_RULES, SizedImageTextModel
from ed_models.body.tiles import TILED_MODULES
from ed_models.body.unpadded import TileGrids
from ed_models.modalities.images import GRID_TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED

LIMITED = "anyres_max_"


@register_config("llava_onevision")
class LlavaOnevisionConfig(EasyDeLBaseConfig, transformers.LlavaOnevisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava_onevision"


class LlavaOnevisionModel(SizedImageTextModel):
    """Vision tower, projector, the feature that ends a row, and decoder."""

    config_class = LlavaOnevisionConfig

    @property
    def grids(self) -> TileGrids:
        """The grids into which images are split.

        Raises:
            ConfigError: `vision_aspect_ratio` does not limit the features of a grid.
        """
        config = self.config
        vision, limit = config.vision_config, config.vision_aspect_ratio.removeprefix(LIMITED)
        if not limit.isdecimal():
            raise ConfigError(
                f"vision_aspect_ratio={config.vision_aspect_ratio!r} is not supported: use "
                f"{LIMITED}N with a number of tiles N, such as {LIMITED}9"
            )
        return TileGrids.of(
            config.image_grid_pinpoints,
            vision.image_size,
            vision.patch_size,
            limit=int(limit),
            may_be_whole=True,
        )


@register_module(
    TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaOnevisionConfig, model_type="llava_onevision"
)
class LlavaOnevisionForConditionalGeneration(ConditionalLM):
    """LLaVA-OneVision with a language-model head."""

    body_class = LlavaOnevisionModel
    modality = GRID_TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = SIZED_TILE_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = SIZED_TILE_RULES
