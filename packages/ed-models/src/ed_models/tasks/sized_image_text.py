"""Vision-language models whose images are grids of tiles without features of padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax
import numpy as np
from ed_infra.inputs import COUNTS, GRIDS, SIZES, Encoded, Inputs

from ed_models.body.unpadded import TileGrids, rows_of_tiles, with_grids
from ed_models.tasks.image_text import ImageTextLM


class GridBody(Protocol):
    """A body that splits images into grids of tiles."""

    @property
    def grids(self) -> TileGrids:
        """The grids into which images are split."""
        ...


class SizedImageTextLM(ImageTextLM):
    """A language model that reads `image_sizes` [b, i, 2], the heights and widths of images, and
    `image_grids` [b, i, 2], their rows and columns of tiles, which follow from the sizes.

    `pixel_values` [b, t, c, h, w] contains the tiles of all images of a row, of which the first of
    each image is the whole image; padded at the end.
    """

    image_names = ("pixel_values", SIZES, GRIDS)
    input_names = (*ImageTextLM.input_names, SIZES, GRIDS)
    processor_names = (*ImageTextLM.processor_names, COUNTS)

    @property
    def grids(self) -> TileGrids:
        """The grids into which images are split."""
        return cast(GridBody, self.model).grids

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of the images of each row; see `with_grids`."""
        return super().encode(Inputs(with_grids(self.grids, inputs), inputs.declared), key=key)

    def batched_inputs(self, input_ids: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt; see `rows_of_tiles`."""
        placeholders = np.asarray(input_ids) == self.config.image_token_id
        return rows_of_tiles(self.grids, placeholders, arrays)
