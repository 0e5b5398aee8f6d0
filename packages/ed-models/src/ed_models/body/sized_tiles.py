"""The body of vision-language models that split images into tiles without features of padding.

Legend: b rows, i images and t tiles of a row, c channels, h height, w width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import GRIDS, SIZES, Encoded
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.tiles import TILED_NAMES, TILED_WEIGHTS, TiledImageTextModel, TwoLayerProjector
from ed_models.body.unpadded import TileGrids, with_grids
from ed_models.weights.rules import Rule, equal

NEWLINE = "image_newline"
#: Names and rules of the checkpoints: those of LLaVA, and the feature that ends a row.
SIZED_TILE_NAMES = {**TILED_NAMES, "model.image_newline": NEWLINE}
SIZED_TILE_RULES = (Rule("model.image_newline", NEWLINE, equal), *TILED_WEIGHTS)


class SizedImageTextModel(TiledImageTextModel):
    """Vision tower, projector, the feature that ends a row, and decoder."""

    projector_class = TwoLayerProjector

    def __init__(self, config: EasyDeLBaseConfig, *numbers: Any, rngs: nnx.Rngs):
        super().__init__(config, *numbers, rngs=rngs)
        parts = Parts(config, rngs, self.dtype, self.param_dtype)
        self.image_newline = parts.table(config.text_config.hidden_size, axes=("embed",))

    @property
    @abstractmethod
    def grids(self) -> TileGrids:
        """The grids into which images are split."""

    def encode(
        self,
        pixel_values: Float[Array, "b t c h w"],
        image_sizes: Int[Array, "b i 2"],
        image_grids: Int[Array, "b i 2"] | None = None,
    ) -> Encoded:
        """Return the features of all images of a row, one image after another.

        Args:
            pixel_values: the tiles of all images of a row, of which the first of each image is the
                whole image; padded at the end.
            image_sizes: height and width of each image in pixels before it was resized; 0 = there
                is no image.
            image_grids: rows and columns of tiles of each image; None = the grids of the sizes,
                see `with_grids`.
        """
        b, t, *size = pixel_values.shape
        tiles = self.multi_modal_projector(
            self.select_hidden_states(pixel_values.reshape(b * t, *size))
        )
        tiles = tiles.reshape(b, t, *tiles.shape[1:])
        if image_grids is None:
            image_grids = with_grids(self.grids, {SIZES: image_sizes})[GRIDS]
        sizes, grids = jnp.asarray(image_sizes), jnp.asarray(image_grids)
        return self.grids.assemble_features(tiles, self.image_newline.get_value(), sizes, grids)
