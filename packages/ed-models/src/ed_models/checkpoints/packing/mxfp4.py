"""Blocks of 32 numbers E2M1 with an exponent each (gpt-oss; OCP Microscaling Formats 2023).

`x_blocks` [.., o, i / 32, 16] has two numbers in a byte, the lower bits first, `x_scales`
[.., o, i / 32] the exponents with a bias of 127; together they are `x` [.., i, o].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.packing.float8 import exponents
from ed_models.checkpoints.packing.packed import Packed, Slices, covering
from ed_models.checkpoints.tensor_files import TensorFiles

#: Values of a 4-bit number E2M1: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Numbers that share a scale in MXFP4.
MX_BLOCK = 32


def mxfp4(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """Return the tensors that are stored in blocks.

    Raises:
        CheckpointError: blocks lack their scales.
    """
    suffix = "_blocks"
    for blocks in [name for name in files if name.endswith(suffix)]:
        name = blocks.removesuffix(suffix)
        scales = f"{name}_scales"
        shape = files[blocks].shape
        if scales not in files or files[scales].shape != shape[:-1] or shape[-1] * 2 != MX_BLOCK:
            scale_shape = list(files[scales].shape) if scales in files else "not there"
            raise CheckpointError(
                f"{blocks} is {list(shape)} and {scales} {scale_shape}: MXFP4 has blocks "
                f"[.., {MX_BLOCK // 2}] and a scale for each"
            )
        *lead, o, count, _ = shape
        entry = replace(files[blocks], format="BF16", shape=(*lead, count * MX_BLOCK, o))
        yield Packed(name, entry, (blocks, scales), partial(read_mxfp4, files, blocks, scales))


def read_mxfp4(files: TensorFiles, blocks: str, scales: str, index: Slices) -> np.ndarray:
    """Values of a slice [.., i, o] of one tensor, bfloat16."""
    *leading_index, along, rows = index
    which, inside = covering(along, files[scales].shape[-1] * MX_BLOCK, MX_BLOCK)
    at = (*leading_index, rows, which)
    values = decode_mxfp4(files.read(blocks, at), files.read(scales, at))
    return values[..., inside].swapaxes(-1, -2)


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of MXFP4, bfloat16 [.., n * 32], which holds them exactly.

    Args:
        blocks: uint8 [.., n, 16].
        scales: uint8 [.., n].
    """
    signed = np.array([*_E2M1, *(-x for x in _E2M1)], np.float32)
    codes = np.arange(256)
    pairs = np.stack([signed[codes & 15], signed[codes >> 4]], axis=-1)
    out = np.empty((*blocks.shape[:-1], MX_BLOCK), ml_dtypes.bfloat16)
    # One matrix at a time: the float32 in between is four times as large as the result may be.
    for at in np.ndindex(blocks.shape[:-3]):
        factor = exponents(scales[at]).astype(np.float32)[..., None]
        values = pairs[blocks[at]].reshape(*blocks[at].shape[:-1], MX_BLOCK)
        out[at] = (values * factor).astype(ml_dtypes.bfloat16)
    return out.reshape(*blocks.shape[:-2], blocks.shape[-2] * MX_BLOCK)
