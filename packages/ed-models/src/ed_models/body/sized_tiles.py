"""The body of vision-language models that split images into tiles without features of padding.

Legend: b rows, i images and t tiles of a row, c channels, h height, w width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import GRIDS, SIZES, Encoded, Inputs
from ed_layers.parts import Parts
from flax import nnx

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

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Return the features of all images of a row, one image after another.

        Args:
            inputs: `pixel_values` [b, t, c, h, w], the tiles of all images of a row, of which the
                first of each image is the whole image; padded at the end. `image_sizes` [b, i, 2],
                height and width of each image in pixels before it was resized; 0 = there is no
                image. `image_grids` [b, i, 2], rows and columns of tiles of each image; without
                them, the grids of the sizes, see `with_grids`.
            key: without effect: towers are deterministic.
        """
        b, t, *size = inputs["pixel_values"].shape
        tiles = self.multi_modal_projector(
            self.select_hidden_states(inputs["pixel_values"].reshape(b * t, *size))
        )
        tiles = tiles.reshape(b, t, *tiles.shape[1:])
        grids = inputs.get(GRIDS)
        if grids is None:
            grids = with_grids(self.grids, {SIZES: inputs[SIZES]})[GRIDS]
        sizes, grids = jnp.asarray(inputs[SIZES]), jnp.asarray(grids)
        return self.grids.assemble_features(tiles, self.image_newline.get_value(), sizes, grids)
