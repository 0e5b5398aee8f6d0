"""The features of images that are split into tiles, without those of padding (LLaVA-NeXT).

An image is resized to the best of several resolutions, with padding on two sides, and split into
tiles. The features of an image are those of the whole image in the size of a tile, then the rows of
the grid of all tiles without padding; each row ends with a trained feature. A grid with too many
features may be reduced, and an image may have no grid (LLaVA-OneVision); its features are those of
the whole image, then the feature that ends a row.

The host chooses the grid of an image, because `transformers` chooses in float64. All other numbers
of the grid are integers. The numbers follow Hugging Face's `modeling_llava_next.py` and
`modeling_llava_onevision.py`.

Legend: b rows, i images, t tiles of a row, n patches along the side of a tile, k places of
features, c patches that a feature is the sum of, d hidden.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import COUNTS, GRIDS, SIZES, Encoded
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class TileGrids:
    """The grids into which images are split.

    Attributes:
        resolutions: height and width of each grid in pixels.
        tile: side of a tile in pixels.
        side: n.
        limit: number of tiles whose features are the most that a grid should have: a grid with more
            than 1.21 times as many features is reduced. None = no grid is reduced.
        may_be_whole: whether an image may have no grid. Its grid is [0, 0].
    """

    resolutions: tuple[tuple[int, int], ...]
    tile: int
    side: int
    limit: int | None = None
    may_be_whole: bool = False

    @classmethod
    def of(
        cls, resolutions: Sequence[Sequence[int]], tile: int, patch: int, **options: Any
    ) -> TileGrids:
        """Return the grids of a configuration; `patch` is the side of a patch in pixels."""
        return cls(tuple((h, w) for h, w in resolutions), tile, tile // patch, **options)

    @property
    def counts(self) -> list[int]:
        """Numbers of tiles that an image can have, with the tile of the whole image."""
        counts = {1 + (h // self.tile) * (w // self.tile) for h, w in self.resolutions}
        return sorted(counts | {1} if self.may_be_whole else counts)

    def most(self, tiles: int) -> int:
        """Return the largest number of features of an image with at most `tiles` tiles."""
        most_features = 1 if self.may_be_whole else 0
        for h, w in self.resolutions:
            rows, columns = h // self.tile, w // self.tile
            if rows * columns < tiles:
                # An image without padding along one axis has any number of patches along the other.
                y, x = rows * self.side, columns * self.side
                table = self._reduced[: y + 1, : x + 1]
                edges = np.concatenate([table[y], table[:, x]])
                most_features = max(most_features, int((edges[:, 0] * (edges[:, 1] + 1)).max()))
        return self.side**2 + most_features

    def sizes(self, height: int, width: int, *, without_grid: bool = False) -> tuple[int, int]:
        """Return the numbers of tiles and of features of an image.

        Args:
            height: height in pixels.
            width: width in pixels.
            without_grid: whether the image has no grid.
        """
        if without_grid:
            return 1, self.side**2 + 1
        size = np.array([[height, width]], np.int32)
        grid = self.best(size)
        _, shown_counts = shown_patches(size, grid * self.side)
        lines, across = self._reduced[shown_counts[0, 0], shown_counts[0, 1]].tolist()
        return 1 + int(grid.prod()), self.side**2 + lines * (across + 1)

    @property
    def _reduced(self) -> Int[np.ndarray, "lines across 2"]:
        """The numbers of lines and columns of features of a grid that shows so many patches."""
        rows, columns = (max(axis) // self.tile for axis in zip(*self.resolutions, strict=True))
        most = None if self.limit is None else self.limit * self.side**2
        return _reduced_sizes(rows * self.side, columns * self.side, most)

    def best(self, sizes: Int[np.ndarray, "*i 2"]) -> Int[np.ndarray, "*i 2"]:
        """Return rows and columns of tiles for images of these heights and widths.

        The best resolution keeps the most pixels of the image, then has the least padding. The
        order of operations is that of `transformers.image_processing_utils.select_best_resolution`:
        `int(width * scale)` may be one pixel less than the exact result.

        Args:
            sizes: heights and widths; 0 = there is no image, whose grid is [0, 0].
        """
        size = np.maximum(sizes, 1).astype(np.float64)[..., None, :]
        resolutions = np.array(self.resolutions, np.int64)
        scale = (resolutions / size).min(axis=-1, keepdims=True)
        pixels = np.prod(size, axis=-1).astype(np.int64)
        kept_pixels = np.minimum((size * scale).astype(np.int64).prod(axis=-1), pixels)
        padding = resolutions.prod(axis=-1) - kept_pixels
        is_best = kept_pixels == kept_pixels.max(axis=-1, keepdims=True)
        index = np.where(is_best, padding, np.iinfo(np.int64).max).argmin(axis=-1)
        grids = (resolutions // self.tile)[index].astype(np.int32)
        return np.where(np.asarray(sizes)[..., :1] > 0, grids, 0)

    def places(
        self, sizes: Int[Array, "b i 2"], grids: Int[Array, "b i 2"], tiles: int
    ) -> FeaturePlaces:
        """Return the places of the features of a row.

        Args:
            sizes: height and width of each image in pixels; 0 = there is no image.
            grids: rows and columns of tiles of each image, see `best`.
            tiles: number of tiles of a row, including padding.
        """
        b, i, n = sizes.shape[0], sizes.shape[1], self.side
        sizes, grid = sizes.reshape(b * i, 2), grids.reshape(b * i, 2)
        is_image = sizes[:, 0] > 0
        counts = jnp.where(is_image, 1 + grid[:, 0] * grid[:, 1], 0).reshape(b, i)
        first = (jnp.cumsum(counts, axis=1) - counts).reshape(b * i, 1)
        corner, shown_counts = shown_patches(sizes, grid * n)
        lines, across = shown_counts[:, 0], shown_counts[:, 1]
        if self.limit is not None:
            lines, across = jnp.moveaxis(jnp.asarray(self._reduced)[lines, across], -1, 0)
        lines = jnp.where(grid[:, 0] > 0, lines, 1)  # an image without a grid has an empty line
        feature_index = jnp.arange(self.most(tiles), dtype=jnp.int32)
        line, place = jnp.divmod(feature_index - n * n, across[:, None] + 1)
        is_end = (feature_index >= n * n) & (place == across[:, None])

        def locate_patches(y: Int[Array, "i k"], x: Int[Array, "i k"]) -> Int[Array, "i k"]:
            y, x = corner[:, :1] + y, corner[:, 1:] + x
            tile = first + 1 + y // n * grid[:, 1:] + x // n
            inner = jnp.where(
                feature_index < n * n, first * n * n + feature_index, (tile * n + y % n) * n + x % n
            )
            return jnp.where(is_end, tiles * n * n, inner)

        if self.limit is None:
            index = locate_patches(line, place)[..., None]
            weights = jnp.ones((b * i, len(feature_index), 1))
        else:
            y = _neighbours(line, lines, shown_counts[:, 0])
            x = _neighbours(place, across, shown_counts[:, 1])
            pairs = [(down, right) for down in y for right in x]
            index = jnp.stack([locate_patches(down[0], right[0]) for down, right in pairs], axis=-1)
            weights = jnp.stack([down[1] * right[1] for down, right in pairs], axis=-1)
            is_exact = ((feature_index < n * n) | is_end)[..., None]
            weights = jnp.where(is_exact, jnp.eye(1, len(pairs)), weights)
        real = feature_index < (n * n + lines * (across + 1))[:, None]
        real = (real & is_image[:, None]).reshape(b, -1)
        index = jnp.where(real[..., None], index.reshape(b, real.shape[1], -1), 0)
        order = jnp.argsort(~real, axis=1, stable=True)
        return FeaturePlaces(
            jnp.take_along_axis(index, order[..., None], axis=1),
            jnp.take_along_axis(weights.reshape(index.shape), order[..., None], axis=1),
            jnp.take_along_axis(real, order, axis=1),
        )

    def assemble_features(
        self,
        features: Float[Array, "b t m d"],
        newline: Float[Array, " d"],
        sizes: Int[Array, "b i 2"],
        grids: Int[Array, "b i 2"],
    ) -> Encoded:
        """Return the features of the images of each row, one image after another.

        Args:
            features: the n² features of each tile.
            newline: the feature that ends a line.
            sizes: see `places`.
            grids: see `places`.
        """
        b, t, _, d = features.shape
        end = jnp.broadcast_to(newline.astype(features.dtype), (b, 1, d))
        patches = jnp.concatenate([features.reshape(b, -1, d), end], axis=1)
        places = self.places(sizes, grids, t)
        count = places.indices.shape[-1]
        feature_parts = [
            jnp.take_along_axis(patches, places.indices[..., c, None], axis=1) for c in range(count)
        ]
        if count > 1:
            weights = places.weights.astype(features.dtype)
            feature_parts = [x * weights[..., c, None] for c, x in enumerate(feature_parts)]
        return Encoded(sum(feature_parts[1:], feature_parts[0]), places.real.astype(jnp.int32))


class FeaturePlaces(NamedTuple):
    """The patches that the features of the images of a row are made of.

    Attributes:
        indices: numbers in the patches of all tiles of the row, or t n² for the end of a line. The
            real features come first.
        weights: a feature is the sum of its patches with these weights.
        real: which of the k places are features.
    """

    indices: Int[Array, "b k c"]
    weights: Float[Array, "b k c"]
    real: Bool[Array, "b k"]


def _neighbours(
    place: Int[Array, "i k"], count: Int[Array, " i"], shown_counts: Int[Array, " i"]
) -> list[tuple[Int[Array, "i k"], Float[Array, "i k"]]]:
    """Return the two patches between which a feature of a reduced grid is, with their weights.

    Args:
        place: places of the features along one axis.
        count: number of features along the axis.
        shown_counts: number of patches along the axis.
    """
    scale = shown_counts.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
    exact = jnp.maximum((place.astype(jnp.float32) + 0.5) * scale[:, None] - 0.5, 0)
    last = jnp.maximum(shown_counts - 1, 0)[:, None]
    lower = jnp.minimum(exact.astype(jnp.int32), last)
    part = exact - lower
    return [(lower, 1 - part), (jnp.minimum(lower + 1, last), part)]


@functools.lru_cache(maxsize=16)
def _reduced_sizes(lines: int, across: int, most: int | None) -> Int[np.ndarray, "lines across 2"]:
    """Return the sizes to which grids of up to `lines` x `across` patches are reduced.

    The order of operations is that of `transformers`, in float64.
    """
    sizes = np.moveaxis(np.indices((lines + 1, across + 1)), 0, -1)
    if most is None:
        return sizes.astype(np.int32)
    ratio = np.sqrt(sizes.prod(axis=-1) / most)[..., None]
    return np.where(ratio > 1.1, sizes // np.maximum(ratio, 1), sizes).astype(np.int32)


def shown_patches(
    sizes: Int[Any, "i 2"], patches: Int[Any, "i 2"]
) -> tuple[Int[Any, "i 2"], Int[Any, "i 2"]]:
    """Return the patches of grids of tiles that show images of these heights and widths.

    Args:
        sizes: heights and widths, in an array of numpy or jax.
        patches: numbers of rows and columns of patches of the whole grids.

    Returns:
        Row and column of the first patch, and numbers of rows and columns. Other patches are
        padding.
    """
    xp = sizes.__array_namespace__()
    height, width = (xp.maximum(sizes[:, axis], 1) for axis in (0, 1))
    rows, columns = patches[:, 0], patches[:, 1]
    wide = width * rows > columns * height
    top = xp.where(wide, (rows - height * columns // width) // 2, 0)
    left_padding = xp.where(wide, 0, (columns - width * rows // height) // 2)
    first = xp.stack([top, left_padding], axis=1)
    return first, patches - 2 * first


def with_grids(grids: TileGrids, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of images with the grids that the host chooses for their sizes.

    Args:
        grids: the grids of the model.
        arrays: arrays by name. Arrays without sizes, or with grids, are returned unchanged.

    Raises:
        ConfigError: the sizes are traced, so the host does not know them.
    """
    if GRIDS in arrays or SIZES not in arrays:
        return dict(arrays)
    sizes = arrays[SIZES]
    if isinstance(sizes, jax.core.Tracer):
        raise ConfigError(
            f"a compiled function received {SIZES} without {GRIDS}: the grid of an image is chosen "
            "before a function is compiled; pass the arrays of model.batched_inputs"
        )
    return {**arrays, GRIDS: grids.best(np.asarray(sizes, np.int32))}


def rows_of_tiles(
    grids: TileGrids, placeholders: Bool[np.ndarray, "b s"], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arrays of images with a row for each text, and with the grids of the images.

    Args:
        grids: the grids of the model.
        placeholders: which tokens are features of images.
        arrays: arrays with a row for each text; or the arrays of a processor of `transformers`,
            whose tiles and sizes have a row for each image, with `batch_num_images`, the number of
            images of each text with images. Other arrays are returned unchanged.

    Raises:
        ConfigError: the images of a text have another number of features than the text has
            placeholder tokens.
    """
    pixels, sizes = arrays.get("pixel_values"), arrays.get(SIZES)
    if pixels is None or sizes is None or np.ndim(sizes) == 3:
        return with_grids(grids, arrays)
    sizes = np.asarray(sizes, np.int32)
    image_grids = grids.best(sizes)
    extra_arrays = {
        name: x for name, x in arrays.items() if name not in ("pixel_values", SIZES, COUNTS)
    }
    if grids.may_be_whole and COUNTS in arrays:
        counts = np.asarray(arrays[COUNTS])
        image_grids[np.repeat(counts > 1, counts)] = 0
    numbers = [
        grids.sizes(int(size[0]), int(size[1]), without_grid=not grid.any())
        for size, grid in zip(sizes, image_grids, strict=True)
    ]
    tokens = placeholders.sum(axis=1)
    ends = np.cumsum([0, *(features for _, features in numbers)])
    borders = np.searchsorted(ends, np.cumsum([0, *tokens]))
    if ends[-1] != tokens.sum() or (ends[borders] != np.cumsum([0, *tokens])).any():
        raise ConfigError(
            f"the texts have {tokens.tolist()} image tokens, but the images have "
            f"{[features for _, features in numbers]} features: repeat the image token for each "
            "feature, as the processor of the checkpoint does"
        )
    rows = [range(first, last) for first, last in itertools.pairwise(borders)]
    tiles = [
        np.concatenate([pixels[i][: numbers[i][0]] for i in row_images])
        for row_images in rows
        if row_images
    ]
    most = max(1, *map(len, rows)), max(map(len, tiles))
    pixel_rows = np.zeros((len(rows), most[1], *tiles[0].shape[1:]), np.float32)
    placed = np.zeros((2, len(rows), most[0], 2), np.int32)
    for row, row_images in enumerate(rows):
        if row_images:
            row_tiles = tiles.pop(0)
            pixel_rows[row, : len(row_tiles)] = row_tiles
            placed[:, row, : len(row_images)] = (
                sizes[row_images.start : row_images.stop],
                image_grids[row_images.start : row_images.stop],
            )
    return {**extra_arrays, "pixel_values": pixel_rows, SIZES: placed[0], GRIDS: placed[1]}
