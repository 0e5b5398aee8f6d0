"""Images of any size as packed patches, for models whose processors return padded images (Pixtral).

A processor of transformers returns all images, padded to the size of the largest, and their sizes.
Towers read the patches of the images of a row, one image after another. Square blocks of patches
that become one feature are neighbors in this order.

Legend: b rows, i images, p patches, q patches of an image with padding, c channels, h height, w
width, s side of a patch, f = c * s * s, m patches along the side of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class PatchForm:
    """The patches of a model, and the tokens of an image.

    Attributes:
        side: s.
        channels: c; for several frames of a patch, their channels together.
        merge: m.
        ends_rows: whether a token without a feature follows each row of features.
        has_axes: whether tokens have rotary positions along time, height and width.
        most: most features of an image; None = not limited.
    """

    side: int
    channels: int
    merge: int
    ends_rows: bool = False
    has_axes: bool = False
    most: int | None = None

    @property
    def numbers(self) -> int:
        """Number of numbers of a patch, f."""
        return self.channels * self.side**2

    def pack_image(
        self, image: Float[np.ndarray, "c h w"], size: Int[np.ndarray, " 2"]
    ) -> tuple[Float[np.ndarray, "p f"], Int[np.ndarray, " 3"]]:
        """Return the patches of an image, and 1 and their numbers of rows and columns.

        Args:
            image: the image, padded below and at the right.
            size: height and width without padding.

        Raises:
            ConfigError: the size is no multiple of the size of a block.
        """
        height, width = (int(number) for number in size)
        s, m, block = self.side, self.merge, self.side * self.merge
        if height % block or width % block or min(height, width) < block:
            raise ConfigError(
                f"an image has {height} x {width} pixels, but blocks of {block} x {block} pixels "
                "become one feature: use the image processor of the checkpoint"
            )
        c, down, across = len(image), height // block, width // block
        x = np.asarray(image, np.float32)[:, :height, :width]
        x = x.reshape(c, down, m, s, across, m, s).transpose(1, 4, 2, 5, 0, 3, 6)
        return x.reshape(-1, c * s * s), np.array([1, down * m, across * m], np.int32)

    def pack_images(
        self, images: Float[np.ndarray, "i c h w"], sizes: Int[np.ndarray, "i 2"]
    ) -> tuple[Float[np.ndarray, "p f"], Int[np.ndarray, "i 3"]]:
        """Return the patches and the grids of images; see `pack_image`."""
        parts = [self.pack_image(image, size) for image, size in zip(images, sizes, strict=True)]
        patches, grids = zip(*parts, strict=True)
        return np.concatenate(patches), np.stack(grids)

    def gaps(self, grid: Int[np.ndarray, " 3"]) -> tuple[int, ...]:
        """Return the offsets of the tokens between the rows of features of an image.

        Args:
            grid: number of patches along time, height and width.
        """
        if not self.ends_rows:
            return ()
        _, rows, columns = (int(number) // self.merge for number in grid)
        return tuple(row * (columns + 1) - 1 for row in range(1, rows))


def in_blocks(
    patches: Float[np.ndarray, "p f"], grids: Int[np.ndarray, "i 3"], merge: int
) -> Float[np.ndarray, "p f"]:
    """Return the patches of images in an order in which the patches of a block are neighbors.

    Args:
        patches: the patches of each image, row by row.
        grids: numbers of patches along time, height and width.
        merge: m.
    """
    block_rows, first = [np.zeros((0, patches.shape[1]), patches.dtype)], 0
    for t, h, w in np.asarray(grids).tolist():
        image_patches = patches[first : first + t * h * w]
        first += t * h * w
        blocks = image_patches.reshape(t, h // merge, merge, w // merge, merge, -1).swapaxes(2, 3)
        block_rows.append(blocks.reshape(len(image_patches), -1))
    return np.concatenate(block_rows)


def from_positions(
    patches: Float[np.ndarray, "i q f"], positions: Int[np.ndarray, "i q 2"], merge: int
) -> tuple[Float[np.ndarray, "p f"], Int[np.ndarray, "i 3"]]:
    """Return the patches of images, in which those of a block are neighbors, and the grids.

    Args:
        patches: the patches of each image, row by row, then padding.
        positions: column and row of each patch; -1 = padding.
        merge: m.
    """
    patches, positions = np.asarray(patches, np.float32), np.asarray(positions)
    real = positions[..., 0] >= 0
    across, down = (positions.max(axis=1) + 1).T
    grids = np.stack([np.ones_like(down), down, across], axis=1).astype(np.int32)
    return in_blocks(patches[real], grids, merge), grids


def packed_on_device(
    images: Float[Array, "b c h w"], side: int
) -> tuple[Float[Array, "b p f"], Int[Array, "b 1 3"]]:
    """Return the patches of images of one size, a row for each image, and their grids."""
    b, c, h, w = images.shape
    down, across = h // side, w // side
    x = images[:, :, : down * side, : across * side]
    x = x.reshape(b, c, down, side, across, side).transpose(0, 2, 4, 1, 3, 5)
    grids = jnp.broadcast_to(jnp.array([1, down, across], jnp.int32), (b, 1, 3))
    return x.reshape(b, down * across, c * side * side), grids
