"""LLaVA-NeXT (Liu et al. 2024): LLaVA for images that are split into tiles.

- an image is the whole image in the size of a tile, and a grid of tiles without padding
- a trained feature ends each row of the grid

The numbers follow Hugging Face's `modeling_llava_next.py`.

Legend: b rows, i images and t tiles of a row, c channels, h height, w width, d hidden.
"""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.inputs import Encoded
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.tiles import OTHER_NAMES, TIED, WEIGHTS, TiledImageTextModel, TwoLayerProjector
from ed_models.body.unpadded import TileGrids
from ed_models.tasks.image_text import ImageTextLM
from ed_models.weights.rules import Rule, equal

NEWLINE = "image_newline"


@register_config("llava_next")
class LlavaNextConfig(EasyDeLBaseConfig, transformers.LlavaNextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava_next"
    text_config: Any = None
    vision_config: Any = None


class LlavaNextModel(TiledImageTextModel):
    """Vision tower, projector, the feature that ends a row, and decoder."""

    config_class = LlavaNextConfig

    def __init__(self, config: Any, *numbers: Any, rngs: nnx.Rngs):
        super().__init__(config, *numbers, rngs=rngs)
        parts = Parts(config, rngs, self.dtype, self.param_dtype)
        self.image_newline = parts.table(config.text_config.hidden_size, axes=("embed",))

    @staticmethod
    def projector(parts: Parts) -> nnx.Module:
        return TwoLayerProjector(parts)

    @property
    def grids(self) -> TileGrids:
        """The grids into which images are split."""
        config: Any = self.config
        vision = config.vision_config
        return TileGrids.of(config.image_grid_pinpoints, vision.image_size, vision.patch_size)

    def encode(
        self, pixel_values: Float[Array, "b t c h w"], image_sizes: Int[Array, "b i 2"]
    ) -> Encoded:
        """Return the features of all images of a row, one image after another.

        Args:
            pixel_values: the tiles of all images of a row, of which the first of each image is the
                whole image; padded at the end.
            image_sizes: height and width of each image in pixels before it was resized; 0 = there
                is no image.
        """
        b, t, *size = pixel_values.shape
        features = self.multi_modal_projector(self.selected(pixel_values.reshape(b * t, *size)))
        d = features.shape[-1]
        newline = self.image_newline.get_value().astype(features.dtype)
        newline = jnp.broadcast_to(newline, (b, 1, d))
        features = jnp.concatenate([features.reshape(b, -1, d), newline], axis=1)
        places, real = self.grids.places(jnp.asarray(image_sizes), t)
        features = jnp.take_along_axis(features, places[..., None], axis=1)
        return Encoded(features, real.astype(jnp.int32))


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaNextConfig, model_type="llava_next")
class LlavaNextForConditionalGeneration(ImageTextLM):
    """LLaVA-NeXT with a language-model head."""

    body_class = LlavaNextModel
    DERIVED = {}
    image_names = ("pixel_values", "image_sizes")
    input_names = (*ImageTextLM.input_names, "image_sizes")
    TIED_WEIGHTS = TIED
    OTHER_NAMES = {**OTHER_NAMES, "model.image_newline": NEWLINE}
    WEIGHTS = (Rule("model.image_newline", NEWLINE, equal), *WEIGHTS)

    @property
    def grids(self) -> TileGrids:
        """The grids into which images are split."""
        return cast(LlavaNextModel, self.model).grids
