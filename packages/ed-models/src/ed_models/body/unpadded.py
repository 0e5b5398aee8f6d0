"""The features of images that are split into tiles, without those of padding (LLaVA-NeXT).

An image is resized to the best of several resolutions, with padding on two sides, and split into
tiles. The features of an image are those of the whole image in the size of a tile, then the rows of
the grid of all tiles without padding; each row ends with a trained feature.

The numbers follow Hugging Face's `modeling_llava_next.py`, in integers.

Legend: b rows, i images, n patches along the side of a tile, k places of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

#: An array of numpy or jax. Methods that accept both use the functions of the array's library.
AnyArray = Any


@dataclass(frozen=True)
class TileGrids:
    """The grids into which images are split.

    Attributes:
        resolutions: height and width of each grid in pixels.
        tile: side of a tile in pixels.
        side: n.
    """

    resolutions: tuple[tuple[int, int], ...]
    tile: int
    side: int

    @classmethod
    def of(cls, resolutions: Sequence[Sequence[int]], tile: int, patch: int) -> TileGrids:
        """Return the grids of a configuration; `patch` is the side of a patch in pixels."""
        return cls(tuple((h, w) for h, w in resolutions), tile, tile // patch)

    @property
    def counts(self) -> list[int]:
        """Numbers of tiles that an image can have, with the tile of the whole image."""
        return sorted({1 + (h // self.tile) * (w // self.tile) for h, w in self.resolutions})

    def most(self, tiles: int) -> int:
        """Return the largest number of features of an image with at most `tiles` tiles."""
        grids = [(h // self.tile, w // self.tile) for h, w in self.resolutions]
        lines = [
            rows * (self.side * columns + 1) for rows, columns in grids if rows * columns < tiles
        ]
        return self.side**2 + self.side * max(lines, default=0)

    def sizes(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of tiles and of features of an image; computed without a device."""
        one = np.array([[height, width]])
        ((rows, columns),) = self.best(one).tolist()
        _, shown = self.shown(one)
        ((lines, across),) = shown.tolist()
        return 1 + rows * columns, self.side**2 + lines * (across + 1)

    def best(self, sizes: Int[AnyArray, "i 2"]) -> Int[AnyArray, "i 2"]:
        """Return rows and columns of tiles for images of these heights and widths.

        The best resolution keeps the most pixels of the image, then has the least padding.
        """
        xp = sizes.__array_namespace__()
        height, width = (xp.maximum(sizes[:, axis, None], 1) for axis in (0, 1))
        resolutions = xp.asarray(self.resolutions, dtype=sizes.dtype)
        h, w = resolutions[:, 0], resolutions[:, 1]
        by_width = w * height <= h * width
        kept = xp.where(by_width, w * (height * w // width), h * (width * h // height))
        kept = xp.minimum(kept, height * width)
        padding = xp.where(kept == kept.max(axis=1, keepdims=True), h * w - kept, 2**31 - 1)
        return (resolutions // self.tile)[xp.argmin(padding, axis=1)]

    def shown(
        self, sizes: Int[AnyArray, "i 2"]
    ) -> tuple[Int[AnyArray, "i 2"], Int[AnyArray, "i 2"]]:
        """Return the patches of the grid of tiles that show images of these heights and widths.

        Returns:
            Row and column of the first patch, and numbers of rows and columns. Other patches are
            padding.
        """
        xp = sizes.__array_namespace__()
        grid = self.best(sizes) * self.side
        height, width = (xp.maximum(sizes[:, axis], 1) for axis in (0, 1))
        rows, columns = grid[:, 0], grid[:, 1]
        wide = width * rows > columns * height
        top = xp.where(wide, (rows - height * columns // width) // 2, 0)
        left = xp.where(wide, 0, (columns - width * rows // height) // 2)
        first = xp.stack([top, left], axis=1)
        return first, grid - 2 * first

    def places(
        self, sizes: Int[Array, "b i 2"], tiles: int
    ) -> tuple[Int[Array, "b k"], Bool[Array, "b k"]]:
        """Return the places of the features of a row, and which of the k places are features.

        The real features come first. A place is a number in the patches of all tiles of the row, or
        `tiles * n²` for the end of a line.

        Args:
            sizes: height and width of each image in pixels; 0 = there is no image.
            tiles: number of tiles of a row, including padding.
        """
        b, i, n = sizes.shape[0], sizes.shape[1], self.side
        sizes = sizes.reshape(b * i, 2)
        grid, given = self.best(sizes), sizes[:, 0] > 0
        counts = jnp.where(given, 1 + grid[:, 0] * grid[:, 1], 0).reshape(b, i)
        first = (jnp.cumsum(counts, axis=1) - counts).reshape(b * i, 1)
        corner, shown = self.shown(sizes)
        top, left, rows, across = *corner.T, *shown.T
        own = jnp.arange(self.most(tiles), dtype=jnp.int32)
        line, place = jnp.divmod(own - n * n, across[:, None] + 1)
        y, x = top[:, None] + line, left[:, None] + place
        tile = first + 1 + y // n * grid[:, 1:] + x // n
        found = jnp.where(own < n * n, first * n * n + own, (tile * n + y % n) * n + x % n)
        is_end = (own >= n * n) & (place == across[:, None])
        found = jnp.where(is_end, tiles * n * n, found).reshape(b, -1)
        real = own < (n * n + rows * (across + 1))[:, None]
        real = (real & given[:, None]).reshape(b, -1)
        order = jnp.argsort(~real, axis=1, stable=True)
        return (
            jnp.take_along_axis(jnp.where(real, found, 0), order, axis=1),
            jnp.take_along_axis(real, order, axis=1),
        )
