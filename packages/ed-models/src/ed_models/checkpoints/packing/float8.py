"""Float8 with a scale for each block of a matrix, or for all of it (DeepSeek-V3).

`x.weight` [.., o, i] is float8. Its values are multiplied by the scales `x.weight_scale_inv`
[.., ceil(o / 128), ceil(i / 128)]. `weight_block_size` of the settings is the size of the blocks;
None means one scale for the tensor. Scales may be E8M0, which stores only exponents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.packing.packed import Packed, Slices, dequantize_groups
from ed_models.checkpoints.tensor_files import TensorFiles


def float8(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """The tensors that have scales.

    Raises:
        CheckpointError: scales do not fit their tensors, or there are none.
    """
    block = settings.get("weight_block_size")
    suffix = "_scale_inv"
    scaled = {name.removesuffix(suffix): name for name in files if name.endswith(suffix)}
    for name, scale in scaled.items():
        if name not in files:
            raise CheckpointError(f"{scale} is a scale of {name}, which is not in the checkpoint")
        shape, grid = files[name].shape, files[scale].shape
        fits = grid == compute_grid(shape, block) if block else math.prod(grid) == 1
        if not fits:
            raise CheckpointError(
                f"{scale} is {list(grid)}, but {name} {list(shape)} has blocks of "
                f"{block or 'any size'} (weight_block_size), so there should be "
                f"{list(compute_grid(shape, block)) if block else 'one scale'}"
            )
        read = partial(read_blocks, files, name, scale, None, block or shape[-2:])
        yield Packed(name, replace(files[name], format="F32"), (scale,), read)
    bare = [n for n, e in files.items() if e.format.startswith("F8_E4") and n not in scaled]
    if bare:
        raise CheckpointError(
            f"{len(bare)} tensors are float8 without a scale ({bare[0]}_scale_inv): the checkpoint "
            "is not whole; download or save it again"
        )


def read_blocks(
    files: TensorFiles,
    name: str,
    scale: str,
    zero: str | None,
    block: Sequence[int],
    index: Slices,
) -> np.ndarray:
    """Float32 values of a slice of one tensor whose blocks have scales, and perhaps zero points."""
    *leading_index, down, along = index
    shape = files[name].shape
    grid = compute_grid(shape, block)
    rows = np.arange(shape[-2])[down] // block[0]

    def select_scale_rows(values: np.ndarray) -> np.ndarray:
        return values.reshape(grid)[tuple(leading_index)][..., rows, :]

    zeros = None if zero is None else select_scale_rows(files.read(zero))
    scales = select_scale_rows(exponents(files.read(scale)))
    columns = np.arange(shape[-1])[along] // block[1]
    return dequantize_groups(files.read(name, index), columns, zeros, scales)


def compute_grid(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """How many scales a tensor [.., o, i] has along each dimension."""
    sides = (-(-n // b) for n, b in zip(shape[-2:], block, strict=True))
    return (*shape[:-2], *sides)


def exponents(scales: np.ndarray) -> np.ndarray:
    """Scales that are stored as bytes are exponents with a bias of 127."""
    if scales.dtype != np.uint8:
        return scales
    return scales.view(ml_dtypes.float8_e8m0fnu)
