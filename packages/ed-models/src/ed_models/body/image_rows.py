"""The packed patches of several rows: from the arrays of a processor to one array per row.

A processor of transformers returns the patches of all images of all rows, [p, f], and the grid of
each image, [i, 3]. A batch has arrays with a row for each text.

Legend: b rows, s positions, i images, p patches, f numbers of a patch, m patches along the side of
a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError

#: Smallest number of features for which programs are compiled.
SMALLEST_BUCKET = 16


def rounded_patches(count: int, merge: int) -> int:
    """Return the bucket of a number of patches: m² times a power of two."""
    blocks = max(SMALLEST_BUCKET, -(-count // merge**2))
    return merge**2 * (1 << (blocks - 1).bit_length())


def feature_counts(grids: np.ndarray, merge: int) -> np.ndarray:
    """Return the number of features of each grid [.., 3]."""
    return grids.prod(axis=-1) // merge**2


def rows_of_images(
    placeholders: np.ndarray, arrays: Mapping[str, Any], merge: int
) -> dict[str, np.ndarray]:
    """Return `pixel_values` [b, p, f] and `image_grid_thw` [b, i, 3], padded to buckets.

    Args:
        placeholders: which tokens are features of images, [b, s].
        arrays: `pixel_values` and `image_grid_thw` of a processor, [p, f] and [i, 3], or with a
            row for each text; and other arrays, which are returned unchanged.
        merge: m.

    Raises:
        ConfigError: an array is missing, or the numbers of patches, features and placeholder
            tokens differ.
    """
    extra_arrays = {n: x for n, x in arrays.items() if n not in ("pixel_values", "image_grid_thw")}
    if len(extra_arrays) == len(arrays):
        return extra_arrays
    if len(arrays) != len(extra_arrays) + 2:
        raise ConfigError(
            "images of different sizes have two arrays, pixel_values and image_grid_thw: pass both"
        )
    pixels, grids = (np.asarray(arrays[name]) for name in ("pixel_values", "image_grid_thw"))
    if grids.ndim not in (2, 3) or grids.shape[-1] != 3 or pixels.ndim != grids.ndim:
        raise ConfigError(
            f"pixel_values has shape {list(pixels.shape)} and image_grid_thw {list(grids.shape)}: "
            "pass [patches, numbers] and [images, 3], or both with a row for each text"
        )
    tokens = placeholders.sum(axis=1)
    if grids.ndim == 2:
        parts = _split_images(pixels, grids, tokens, merge)
    else:
        used = [row[row.prod(axis=1) > 0] for row in grids]
        parts = [
            (row[: int(row_grids.prod(axis=1).sum())], row_grids)
            for row, row_grids in zip(pixels, used, strict=True)
        ]
    for number, ((patches, row_grids), count) in enumerate(zip(parts, tokens, strict=True)):
        features = int(feature_counts(row_grids, merge).sum())
        if features != count or len(patches) != row_grids.prod(axis=1).sum():
            raise ConfigError(
                f"row {number} has {count} image tokens, {len(patches)} patches and the grids "
                f"{row_grids.tolist()}, which have {features} features: repeat the image token for "
                "each "
                "feature, as the processor of the checkpoint does"
            )
    return {**extra_arrays, **padded_rows(parts, pixels.shape[-1], merge)}


def padded_rows(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], numbers: int, merge: int
) -> dict[str, np.ndarray]:
    """Return the patches and grids of rows in arrays, padded with zeros to buckets.

    Args:
        parts: patches [p, f] and grids [i, 3] of each row.
        numbers: f.
        merge: m.
    """
    most = rounded_patches(max(len(patches) for patches, _ in parts), merge)
    images = 1 << (max(1, *(len(grids) for _, grids in parts)) - 1).bit_length()
    pixels = np.zeros((len(parts), most, numbers), np.float32)
    grids = np.zeros((len(parts), images, 3), np.int32)
    for row, (patches, row_grids) in enumerate(parts):
        pixels[row, : len(patches)], grids[row, : len(row_grids)] = patches, row_grids
    return {"pixel_values": pixels, "image_grid_thw": grids}


def _split_images(
    pixels: np.ndarray, grids: np.ndarray, tokens: np.ndarray, merge: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Assign images to rows: a row gets the images whose features have its placeholder tokens."""
    ends = np.cumsum(feature_counts(grids, merge))
    borders = np.searchsorted(ends, np.cumsum(tokens), side="right")
    borders[-1] = len(grids)
    patches = np.r_[0, np.cumsum(grids.prod(axis=1))]
    first, parts = 0, []
    for last in borders.tolist():
        parts.append((pixels[patches[first] : patches[last]], grids[first:last]))
        first = last
    return parts
