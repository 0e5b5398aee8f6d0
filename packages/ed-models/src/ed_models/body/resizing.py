"""Resizing of grids of embeddings, with the numbers of `torch.nn.functional.interpolate`.

Legend: n old positions, m new positions, d features.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ResizeKernel = Literal["bilinear", "bicubic"]
#: ResizeKernel -> half the width of its kernel, in old positions.
_REACH = {"bilinear": 1, "bicubic": 2}


def resized_grid(
    grid: Float[Array, "h w d"],
    height: int,
    width: int,
    method: ResizeKernel = "bicubic",
    *,
    antialias: bool = False,
) -> Float[Array, "height width d"]:
    """Resize a grid of embeddings; corners are not aligned.

    Args:
        grid: the embeddings, computed in float32.
        height, width: new size.
        method: kernel of the interpolation.
        antialias: widen the kernel if the new grid is smaller.
    """
    rows = resizing_matrix(grid.shape[0], height, method, antialias=antialias)
    columns = resizing_matrix(grid.shape[1], width, method, antialias=antialias)
    x = jnp.einsum(
        "hwd,ih,jw->ijd",
        grid.astype(jnp.float32),
        *(rows, columns),
        precision=jax.lax.Precision.HIGHEST,
    )
    return x.astype(grid.dtype)


def resizing_matrix(
    old: int, new: int, method: ResizeKernel, *, antialias: bool = False
) -> Float[np.ndarray, "m n"]:
    """Return the weights of the old positions for each new position; float32, rows sum to 1."""
    scale = old / new
    width = max(scale, 1.0) if antialias else 1.0
    centers = (np.arange(new) + 0.5) * scale - 0.5
    reach = int(np.ceil(_REACH[method] * width)) + 1
    places = np.floor(centers).astype(int)[:, None] + np.arange(-reach, reach + 1)
    # torch uses another cubic kernel with antialiasing: that of Pillow.
    weights = _kernel((places - centers[:, None]) / width, method, -0.5 if antialias else -0.75)
    if antialias:  # the kernel ends at the border of the grid
        weights = np.where((places >= 0) & (places < old), weights, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(places, 0, old - 1)), weights)
    return matrix.astype(np.float32)


def _kernel(x: np.ndarray, method: ResizeKernel, a: float) -> np.ndarray:
    """Return the weights at distances x; `a` is the parameter of the cubic kernel."""
    x = np.abs(x)
    if method == "bilinear":
        return np.maximum(1 - x, 0.0)
    inner_weights = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, inner_weights, np.where(x < 2, far, 0.0))
