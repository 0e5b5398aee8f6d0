"""The processor of Command A Vision for environments without torchvision.

The image processor of transformers imports torchvision. The classes here have the same names (for
`Cohere2VisionImageProcessor` with the ending `Pil`, as other processors have), settings, rules and
output, so `save_pretrained` writes the same files. PIL resizes images, so pixels of a resized image
differ in rounding.
"""

from __future__ import annotations

import itertools
from os import PathLike
from typing import Any, Self

import numpy as np
import transformers
from transformers import AutoTokenizer
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil


def choose_grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return the numbers of columns and rows of the tiles of an image.

    The grid enlarges the image least, or reduces the image least if each grid reduces it. Of equal
    grids, the one with the fewest tiles is chosen.

    Args:
        height: of the image in pixels.
        width: of the image in pixels.
        side: side of a tile in pixels.
        most: most tiles of an image.
    """
    counts = range(1, most + 1)
    grids = [grid for grid in itertools.product(counts, counts) if grid[0] * grid[1] <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = (np.array(grids) * side / np.array([width, height])).min(axis=1)
    if (scales < 1).all():
        return grids[int(scales.argmax())]
    return grids[int(np.where(scales < 1, np.inf, scales).argmin())]


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):
    """Splits images into tiles `pixel_values` [t, c, h, w], and counts them: `num_patches` [i]."""

    size = {"height": 512, "width": 512}  # noqa: RUF012
    crop_to_patches = True
    patch_size = 16

    def crop_image_to_patches(
        self,
        image: np.ndarray,
        min_patches: int,
        max_patches: int,
        use_thumbnail: bool = True,
        patch_size: SizeDict | None = None,
        resample: PILImageResampling | None = None,
    ) -> list[np.ndarray]:
        """Return the tiles of an image, and the whole image as a tile if it has several.

        Args:
            image: pixels [c, h, w].
            min_patches: without effect, as in transformers.
            max_patches: most tiles of an image.
            use_thumbnail: whether the whole image follows its tiles.
            patch_size: size of a tile; None = `size`.
            resample: filter of PIL for resizing.
        """
        tile = SizeDict(**self.size) if patch_size is None else patch_size
        side, across = tile.height, tile.width
        assert side is not None, "tiles have a height"
        assert across is not None, "tiles have a width"
        height, width = image.shape[1:]
        columns, rows = choose_grid(height, width, side, max_patches)
        whole = SizeDict(height=rows * side, width=columns * across)
        resized = self.resize(image, whole, resample=resample)
        tiles = [
            part for row in np.split(resized, rows, axis=1) for part in np.split(row, columns, 2)
        ]
        if use_thumbnail and len(tiles) > 1:
            tiles.append(self.resize(image, tile, resample=resample))
        return tiles

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: dict[str, Any] | None = None
    ) -> int:
        """Return the number of tiles of an image with a height and a width in pixels."""
        options = images_kwargs or {}
        most: int = options.get("max_patches", self.max_patches)
        if not options.get("crop_to_patches", self.crop_to_patches) or most == 1:
            return 1
        columns, rows = choose_grid(height, width, self.size["height"], most)
        return columns * rows + (columns * rows > 1)


class Cohere2VisionProcessor(transformers.Cohere2VisionProcessor):
    """A tokenizer and the image processor for PIL."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, *args: object, **options: object
    ) -> Self:
        """Load the two parts of a directory or a hub repository; options are keywords."""
        if args:
            raise TypeError("pass the options of from_pretrained as keywords")
        name, image_options = pretrained_model_name_or_path, dict[str, Any](options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        image_options.pop("trust_remote_code", None)
        images = Cohere2VisionImageProcessorPil.from_pretrained(name, **image_options)
        return cls(images, tokenizer, tokenizer.chat_template)
