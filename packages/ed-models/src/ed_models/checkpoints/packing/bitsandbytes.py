"""bitsandbytes: 4-bit codes of a table, and int8 with scales of rows (Dettmers et al. 2022, 2023).

4 bits: `x.weight` holds the codes of all numbers one after another, two in a byte, the higher bits
first. `x.weight.quant_map` [16] is the table (nf4 or fp4), `x.weight.absmax` the scale of each
block of `blocksize` numbers, and `x.weight.quant_state.bitsandbytes__nf4` JSON text with the shape
and the sizes. With double quantization `absmax` is itself codes: of `nested_quant_map` [256], with
scales `nested_absmax` of blocks, less `nested_offset`.

8 bits: `x.weight` int8 [o, i] and `x.SCB` [o], the largest magnitude of each row, which is 127.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.packing.packed import FLOATS, Packed, Slices, expect
from ed_models.checkpoints.tensor_files import TensorFiles

_LAYOUT = "bitsandbytes"
_KINDS = ("nf4", "fp4")
_MOST = 2**16  # bytes of a layer's settings
#: 1 / 127 as bitsandbytes writes it.
_STEP = np.float32(7.874015718698502e-3)


def bitsandbytes(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """The weights that are codes.

    Raises:
        CheckpointError: tensors are missing, or do not fit each other.
    """
    marker = ".quant_state.bitsandbytes__"
    for state in [name for name in files if marker in name]:
        name, kind = state.split(marker)
        yield _four_bits(files, name, kind, state)
    for scale in [name for name in files if name.endswith(".SCB")]:
        layer = scale.removesuffix("SCB")
        name, form = f"{layer}weight", f"{layer}weight_format"
        entry = expect(files, _LAYOUT, name, (None, None), ["I8"])
        expect(files, _LAYOUT, scale, entry.shape[:1], FLOATS)
        if form in files and files.read(form).any():
            raise CheckpointError(
                f"{_LAYOUT}: {form}: {name} is ordered for one kernel, which is not supported; "
                "save the checkpoint again with a recent version"
            )
        parts = (scale, *({form} & files.keys()))
        yield Packed(name, replace(entry, format="F32"), parts, partial(_read8, files, name, scale))


class _State(NamedTuple):
    """The `quant_state` of a tensor: its shape, and how many numbers share a scale.

    `nested` scales share a second scale, and are stored minus `offset`; 0: they are plain numbers.
    """

    shape: tuple[int, ...]
    block: int
    nested: int
    offset: float


def _four_bits(files: TensorFiles, name: str, kind: str, text: str) -> Packed:
    state = _state(files, kind, text)
    numbers = math.prod(state.shape)
    blocks = math.ceil(numbers / state.block)
    if name not in files:
        expect(files, _LAYOUT, name, (None, 1), ["U8"])
    codes = files[name]
    if codes.stop - codes.start != math.ceil(numbers / 2):
        raise CheckpointError(
            f"{_LAYOUT}: {name} has {codes.stop - codes.start} bytes, and {list(state.shape)} "
            f"numbers of 4 bits ({text}) have {math.ceil(numbers / 2)}"
        )
    parts = {"quant_map": ((16,), "F32"), "absmax": ((blocks,), "F32")}
    if state.nested:
        scales = (math.ceil(blocks / state.nested),)
        parts |= {"absmax": ((blocks,), "U8"), "nested_absmax": (scales, "F32")}
        parts |= {"nested_quant_map": ((256,), "F32")}
    for part, (shape, format_) in parts.items():
        expect(files, _LAYOUT, f"{name}.{part}", shape, [format_])
    entry = replace(codes, format="F32", shape=state.shape)
    hidden = (text, *(f"{name}.{part}" for part in parts))
    return Packed(name, entry, hidden, partial(_read4, files, name, state))


def _state(files: TensorFiles, kind: str, name: str) -> _State:
    """Read JSON text from the bytes of a tensor."""
    entry = expect(files, _LAYOUT, name, (None,), ["U8"])
    try:
        if entry.stop - entry.start > _MOST:
            raise ValueError(f"more than {_MOST} bytes")
        content = dict(json.loads(files.read(name).tobytes()))
        state = _State(
            tuple(operator.index(n) for n in content["shape"]),
            operator.index(content["blocksize"]),
            operator.index(content.get("nested_blocksize", 0)),
            float(content.get("nested_offset", 0)),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{_LAYOUT}: {name} is not JSON text with a shape and a blocksize ({error!r})"
        ) from error
    odd = state.block < 2 or state.block % 2 or state.nested < 0
    if kind not in _KINDS or odd or min(state.shape, default=0) < 1:
        raise CheckpointError(
            f"{_LAYOUT}: {name} has {state} of kind {kind!r}; known are {', '.join(_KINDS)} with "
            "an even blocksize and a shape without zeros"
        )
    return state


def _read4(files: TensorFiles, name: str, state: _State, index: Slices) -> np.ndarray:
    """Float32 values of a slice of one tensor.

    Whole rows (entries of the first dimension) are read, from the block that the first one begins
    in to the block that the last one ends in.
    """
    shape, block = state.shape, state.block
    row = math.prod(shape[1:])
    row_range = range(shape[0])[index[0]]
    if not row_range:
        return np.empty((0, *shape[1:]), np.float32)[(slice(None), *index[1:])]
    start, stop = row_range[0] * row, (row_range[-1] + 1) * row
    blocks = range(start // block, -(-stop // block))
    data = files.read(name).reshape(-1).view(np.uint8)
    data = data[blocks.start * block // 2 : blocks.stop * block // 2]
    table = files.read(f"{name}.quant_map")
    codes = np.arange(256)
    values = np.stack([table[codes >> 4], table[codes & 15]], axis=-1)[data].reshape(-1)
    scales = _scales(files, name, state, blocks)
    full_blocks = len(values) // block
    values[: full_blocks * block].reshape(full_blocks, block)[...] *= scales[:full_blocks, None]
    values[full_blocks * block :] *= scales[full_blocks:]  # the last block may be shorter
    rows = values[start - blocks.start * block :][: stop - start].reshape(-1, *shape[1:])
    return rows[(slice(None, None, row_range.step), *index[1:])]


def _scales(files: TensorFiles, name: str, state: _State, blocks: range) -> np.ndarray:
    """Float32 scales of some blocks."""
    stored = files.read(f"{name}.absmax", (slice(blocks.start, blocks.stop),))
    if not state.nested:
        return stored
    table, factors = (files.read(f"{name}.nested_{of}") for of in ("quant_map", "absmax"))
    return table[stored] * factors[np.asarray(blocks) // state.nested] + np.float32(state.offset)


def _read8(files: TensorFiles, name: str, scale: str, index: Slices) -> np.ndarray:
    """Float32 values of a slice of one tensor."""
    values = files.read(name, index).astype(np.float32)
    scales = files.read(scale, index[:1]).astype(np.float32)
    values *= scales.reshape(-1, *(1,) * (values.ndim - 1))
    values *= _STEP
    return values
