"""Images of different sizes for vision-language models: placeholder tokens and packed patches.

Legend: b rows, i images of a row, p patches of a row, f numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.rows.example import RowImage
from ed_data.tokens.images import BLANK, ImageEncoder, ImageTokens, ModelProcessor, size_of

GRID = "image_grid_thw"
#: Largest number of images whose sizes are kept, and smallest number of features of a row.
_KEPT, _SMALLEST = 2**17, 16


class PatchCounts(NamedTuple):
    """Numbers of placeholder tokens and of patches of an image."""

    tokens: int
    patches: int


class PatchEncoder(ImageEncoder):
    """Counts the features of images, and packs the patches of the images of a row.

    The image processor returns `pixel_values` [p, f], the patches of an image, and
    `image_grid_thw` [1, 3], their numbers along time, height and width.
    """

    def __init__(self, processor: ModelProcessor) -> None:
        super().__init__(processor)
        self._counts: dict[str, PatchCounts] = {}

    @staticmethod
    def fits(processor: ModelProcessor) -> bool:
        """Return whether the image processor of a processor returns packed patches."""
        images = getattr(processor, "image_processor", None)
        return GRID in (getattr(images, "model_input_names", None) or ())

    @cached_property
    def numbers(self) -> int:
        """Number of numbers of a patch, f."""
        return self.processed(BLANK)["pixel_values"].shape[-1]

    def counts(self, image: RowImage) -> PatchCounts:
        """Return the numbers of tokens and patches of an image, from its size.

        Raises:
            DataError: the image cannot be read, or the processor refuses its size.
        """
        known = self._counts.get(image.where)
        if known is not None:
            return known
        height, width = size_of(image)
        try:
            found = self.processor._get_num_multimodal_tokens(image_sizes=[[height, width]])
        except ValueError as error:
            raise DataError(
                f"{image.where}: the processor refuses an image of {width} x {height} pixels: "
                f"{error}; resize the image, or set on_error: skip"
            ) from error
        counts = PatchCounts(int(found.num_image_tokens[0]), int(found.num_image_patches[0]))
        if len(self._counts) >= _KEPT:
            self._counts.clear()
        self._counts[image.where] = counts
        return counts

    def tokens(self, image: RowImage) -> ImageTokens:
        """Return one placeholder token for each feature of an image."""
        assert self.token is not None
        return ImageTokens([self.token] * self.counts(image).tokens, 1)

    def width(self, rows: Sequence[Sequence[RowImage]]) -> tuple[int, ...]:
        """Return the buckets of patches and of images of a row, for the rows of a whole batch.

        A bucket is a power of two of features or images, so few programs are compiled.
        """
        features, merge, most = _SMALLEST, 1, 1
        for images in rows:
            counts = [self.counts(image) for image in images]
            features = max(features, sum(count.tokens for count in counts))
            merge = max([merge, *(count.patches // count.tokens for count in counts)])
            most = max(most, len(images))
        return _rounded(features) * merge, _rounded(most)

    def arrays(
        self, images: Mapping[int, Sequence[RowImage]], rows: int, width: tuple[int, ...]
    ) -> dict[str, NDArray[Any]]:
        """Return `pixel_values` [b, p, f] and `image_grid_thw` [b, i, 3], padded with zeros.

        Raises:
            DataError: the processor returned another number of patches than it counted.
        """
        patches, most = width
        pixels = np.zeros((rows, patches, self.numbers), np.float32)
        grids = np.zeros((rows, most, 3), np.int32)
        for row, of_row in images.items():
            filled = 0
            for place, image in enumerate(of_row):
                output, counts = self.processed(image), self.counts(image)
                made = np.asarray(output["pixel_values"], np.float32)
                (grid,) = np.asarray(output[GRID])
                if len(made) != counts.patches or grid.prod() != counts.patches:
                    raise DataError(
                        f"{image.where}: the processor counted {counts.patches} patches, but "
                        f"returned {len(made)} with the grid {grid.tolist()}: use the processor "
                        "and the image processor of one checkpoint"
                    )
                pixels[row, filled : filled + len(made)], grids[row, place] = made, grid
                filled += len(made)
        return {"pixel_values": pixels, GRID: grids}


def _rounded(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()
