"""The places of packed patches: image, row, column and window of each patch of a row.

An image is a grid of t frames, h rows and w columns of patches. Square blocks of `merge` x `merge`
patches become one feature; the patches of a block are neighbors in the packed order (Qwen2-VL).

Legend: b rows, i images of a row, p patches of a row, m patches along the side of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PatchPlaces:
    """The place of each patch of a row.

    Attributes:
        frames: number of the frame in the row, from 1; 0 = padding, [b, p]. An image has one frame.
        position_ids: row and column of the patch in its image, [2, b, p].
        windows: number of the window in the row, from 1; 0 = padding, [b, p].
        sizes: number of rows and columns of the image of the patch, [2, b, p].
    """

    frames: Int[Array, "b p"]
    position_ids: Int[Array, "2 b p"]
    windows: Int[Array, "b p"]
    sizes: Int[Array, "2 b p"]

    @classmethod
    def of(
        cls, grids: Int[Array, "b i 3"], count: int, *, merge: int, window: int | None = None
    ) -> Self:
        """Compute the places of `count` patches of each row.

        Args:
            grids: number of patches of each image along time, height and width.
            count: number of patches of a row, including padding.
            merge: patches along the side of a block.
            window: blocks along the side of a window; None = a window is a frame.
        """
        grids = grids.astype(jnp.int32)
        ends = jnp.cumsum(jnp.prod(grids, axis=2), axis=1, dtype=jnp.int32)
        patch = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (grids.shape[0], count))
        passed = jnp.sum(ends[:, None, :] <= patch[:, :, None], axis=2)
        image = jnp.minimum(passed, grids.shape[1] - 1)

        def select_by_image(values: Int[Array, "b i"]) -> Int[Array, "b p"]:
            return jnp.take_along_axis(values, image, axis=1)

        def total_before(values: Int[Array, "b i"]) -> Int[Array, "b p"]:
            return select_by_image(jnp.cumsum(values, axis=1, dtype=jnp.int32) - values)

        t, h, w = (grids[..., axis] for axis in range(3))
        rows, columns = (jnp.maximum(select_by_image(x), 1) for x in (h, w))
        within = patch - total_before(t * h * w)
        frame, within = within // (rows * columns), within % (rows * columns)
        block, inside = within // merge**2, within % merge**2
        across = jnp.maximum(columns // merge, 1)
        top, block_column = block // across, block % across
        real = patch < ends[:, -1:]
        frames = total_before(t) + frame + 1
        windows = frames
        if window is not None:
            high, wide = (-(-x // (merge * window)) for x in (h, w))
            windows = frame * select_by_image(high) + top // window
            windows = windows * select_by_image(wide) + block_column // window + 1
            windows += total_before(t * high * wide)
        row, column = top * merge + inside // merge, block_column * merge + inside % merge
        return cls(
            jnp.where(real, frames, 0),
            jnp.where(real, jnp.stack([row, column]), 0),
            jnp.where(real, windows, 0),
            jnp.stack([rows, columns]),
        )

    def by_window(self, merge: int) -> tuple[Self, Int[Array, "b n"]]:
        """Sort the blocks by window, so that the patches of a window are neighbors.

        Returns:
            the places in the new order, and for each block its number in the old order, [b, n].
        """
        blocks = self.windows[:, :: merge**2]
        last = jnp.iinfo(jnp.int32).max
        order = jnp.argsort(jnp.where(blocks == 0, last, blocks), axis=1, stable=True)
        index = get_patch_order(order, merge)

        def sorted_by_window(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, index.reshape((1,) * (x.ndim - 2) + index.shape), axis=-1)

        return jax.tree.map(sorted_by_window, self), order


def real_features(grids: Int[Array, "b i 3"], count: int, merge: int) -> Int[Array, "b n"]:
    """Return which of `count` features of each row are features of images: 1, or 0 = padding."""
    counts = jnp.sum(jnp.prod(grids, axis=2), axis=1) // merge**2
    return (jnp.arange(count) < counts[:, None]).astype(jnp.int32)


def get_patch_order(order: Int[Array, "b n"], merge: int) -> Int[Array, "b p"]:
    """Return the numbers of the patches of blocks in an order of blocks.

    Args:
        order: number of the block that comes first, second, …
        merge: patches along the side of a block.
    """
    size = merge**2
    return (order[:, :, None] * size + jnp.arange(size)).reshape(order.shape[0], -1)
