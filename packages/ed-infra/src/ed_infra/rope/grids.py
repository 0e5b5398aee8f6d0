"""Positions of tokens in texts with images: time, row and column (M-RoPE, Wang et al., 2024).

Text tokens count up on all three axes. The features of an image have the position of the image plus
their place in its grid, and the text after an image continues after its last row or column.
Positions of text without images are ordinary positions. The frames of a video have the position of
the video plus their time. The numbers are those of `get_rope_index` of transformers.

Shapes: `b` rows, `s` tokens, `i` images of a row.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_ArrayT = TypeVar("_ArrayT", jax.Array, np.ndarray)


def grid_positions(
    placeholders: _ArrayT, segment_ids: _ArrayT, grids: _ArrayT, times: _ArrayT | None = None
) -> _ArrayT:
    """Return the positions of tokens along time, height and width: int32 [3, b, s].

    Numpy arrays result in numpy arrays, without a device. The k-th placeholder of a row belongs to
    the image that contains the k-th feature of the row.

    Args:
        placeholders: bool [b, s], which tokens are features of images.
        segment_ids: int [b, s]; 1, 2, … = documents of a row, 0 = padding. Positions start at 0
            in each document; those of padding are 0.
        grids: int [b, i, 3], number of features of each image along time, height and width, in the
            order of the images; zeros for missing images.
        times: int [b, i], 1 + the position along time of each frame that continues the video of
            the frame before it, and 0 for other images; None = no image continues a video.
    """
    xp: Any = np if isinstance(placeholders, np.ndarray) else jnp
    sizes = grids.astype(np.int32)
    counts = xp.prod(sizes, axis=2)
    ends = xp.cumsum(counts, axis=1, dtype=np.int32)
    starts = ends - counts
    extents = xp.max(sizes[..., 1:], axis=2) * (counts > 0)
    begins_item = xp.ones_like(counts) if times is None else (times == 0).astype(np.int32)
    spans = xp.cumsum(extents * begins_item, axis=1, dtype=np.int32)
    spans = xp.pad(spans, ((0, 0), (1, 0)))

    preceding_count = xp.cumsum(placeholders, axis=1, dtype=np.int32) - placeholders
    passed = xp.sum(ends[:, None, :] <= preceding_count[:, :, None], axis=2)
    image = xp.minimum(passed, counts.shape[1] - 1)
    text = (segment_ids != 0) & ~placeholders
    # The span of a video includes that of its first frame, whose extent all of its frames have.
    spans_before = xp.where(
        placeholders,
        xp.take_along_axis(spans, image + 1, axis=1) - xp.take_along_axis(extents, image, axis=1),
        xp.take_along_axis(spans, passed, axis=1),
    )
    base = xp.cumsum(text, axis=1, dtype=np.int32) - text + spans_before

    within = preceding_count - xp.take_along_axis(starts, image, axis=1)
    size = xp.take_along_axis(sizes, image[:, :, None], axis=1)
    h, w = (xp.maximum(size[..., axis], 1) for axis in (1, 2))
    time = within // (h * w)
    if times is not None:
        time = time + xp.maximum(xp.take_along_axis(times, image, axis=1) - 1, 0)
    place = xp.stack([time, within // w % h, within % w])
    positions = base + xp.where(placeholders, place, 0)

    reached = _running_maximum(segment_ids)
    begins = reached > xp.pad(reached, ((0, 0), (1, 0)))[:, :-1]
    first = _running_maximum(xp.where(begins, base, 0))
    return xp.where(segment_ids != 0, positions - first, 0).astype(np.int32)


def _running_maximum(x: _ArrayT) -> _ArrayT:
    if isinstance(x, np.ndarray):
        return np.maximum.accumulate(x, axis=1)
    return jax.lax.cummax(x, axis=1)
