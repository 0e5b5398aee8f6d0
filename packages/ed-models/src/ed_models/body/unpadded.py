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

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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
        """Return the numbers of tiles and of features of an image."""
        one = jnp.array([[[height, width]]], jnp.int32)
        rows, columns = self.best(one[0])[0].tolist()
        tiles = 1 + rows * columns
        return tiles, int(self.places(one, tiles)[1].sum())

    def best(self, sizes: Int[Array, "i 2"]) -> Int[Array, "i 2"]:
        """Return rows and columns of tiles for images of these heights and widths.

        The best resolution keeps the most pixels of the image, then has the least padding.
        """
        height, width = (jnp.maximum(sizes[:, axis, None], 1) for axis in (0, 1))
        h, w = (
            jnp.asarray([size[axis] for size in self.resolutions], jnp.int32) for axis in (0, 1)
        )
        by_width = w * height <= h * width
        kept = jnp.where(by_width, w * (height * w // width), h * (width * h // height))
        kept = jnp.minimum(kept, height * width)
        padding = jnp.where(kept == kept.max(axis=1, keepdims=True), h * w - kept, 2**31 - 1)
        grids = jnp.asarray(self.resolutions, jnp.int32) // self.tile
        return grids[jnp.argmin(padding, axis=1)]

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
        height, width = (jnp.maximum(sizes[:, axis], 1) for axis in (0, 1))
        rows, columns = grid[:, 0] * n, grid[:, 1] * n
        wide = width * rows > columns * height
        top = jnp.where(wide, (rows - height * columns // width) // 2, 0)
        left = jnp.where(wide, 0, (columns - width * rows // height) // 2)
        rows, across = rows - 2 * top, columns - 2 * left
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
