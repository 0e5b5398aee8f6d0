"""Values of the tensors of a GGUF file: plain numbers, or blocks of codes with scales.

The formulas of the blocks are those of the `gguf` package, which llama.cpp publishes. A block is a
run of elements of one row, so a slice needs only the blocks that it touches.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.header import GgufHeader, Location, formats
from ed_models.checkpoints.packing.packed import Slices, covering

#: Formats whose elements are numbers.
PLAIN: Mapping[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


def readable_formats() -> tuple[str, ...]:
    """Return the names of the formats that `read_slice` decodes."""
    from gguf.quants import _type_traits

    return (*PLAIN, *sorted(kind.name for kind in _type_traits if kind.name not in PLAIN))


def check_block_format(name: str, form: str) -> None:
    """Check that the values of a tensor can be read.

    Raises:
        CheckpointError: the format of the tensor has no decoder.
    """
    if form not in readable_formats():
        raise CheckpointError(
            f"tensor {name!r} has the format {form}, which is not read (known: "
            f"{', '.join(readable_formats())}): quantize the model to one of these"
        )


def read_slice(data: np.ndarray, tensor: Location, index: Slices) -> np.ndarray:
    """Return `tensor[index]`: a view of plain numbers, or float32 values of decoded blocks.

    Args:
        data: uint8 [bytes], the whole file.
        tensor: the location of the tensor.
        index: a slice with a positive step for each dimension.
    """
    if tensor.format in PLAIN:
        raw = data[tensor.start : tensor.stop]
        return raw.view(PLAIN[tensor.format]).reshape(tensor.shape)[index]
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    block = _find_block_format(tensor.format)
    columns = tensor.shape[-1]
    *at, along = index
    which, inside = covering(along, columns, block.elements)
    blocks = raw_blocks(data, tensor)[(*at, which)]
    *leading_sizes, count, _ = blocks.shape
    if not blocks.size:
        return np.zeros((*leading_sizes, len(range(columns)[along])), np.float32)
    flat = np.ascontiguousarray(blocks).reshape(-1, count * block.bytes)
    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which the loader reports
        values = dequantize(flat, GGMLQuantizationType[tensor.format])
    return values.reshape(*leading_sizes, count * block.elements)[..., inside]


def raw_blocks(data: np.ndarray, tensor: Location) -> np.ndarray:
    """Return the blocks of a tensor, uint8 [.., columns / elements of a block, bytes of a block].

    Args:
        data, tensor: see `read_slice`; the format has blocks.
    """
    block = _find_block_format(tensor.format)
    *rows, columns = tensor.shape
    raw = data[tensor.start : tensor.stop]
    return raw.reshape(*rows, columns // block.elements, block.bytes)


def _find_block_format(form: str) -> Any:
    return next(block for block in formats().values() if block.name == form)


def map_file(file: Path) -> np.ndarray:
    """Map a file into memory; uint8 [bytes]."""
    with file.open("rb") as stream:
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def read_tensor_values(header: GgufHeader, name: str) -> np.ndarray:
    """Return the values of a small tensor."""
    location = header.tensors[name]
    check_block_format(name, location.format)
    return read_slice(
        map_file(header.get_file(name)), location, (slice(None),) * len(location.shape)
    )
