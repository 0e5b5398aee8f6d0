"""compressed-tensors, as llm-compressor writes it (https://github.com/vllm-project).

A weight [o, i] is `x.weight`, int8 or float8, or `x.weight_packed`: codes of 4 or 8 bits in int32
[o, i * bits / 32], the lowest bits first, stored plus 2^(bits - 1), with their shape in
`x.weight_shape`. `x.weight_scale` has one scale, one for each row [o, 1], for each group of a row
[o, groups], or for each block of the matrix. `x.weight_zero_point` has as many zero points, packed
along o where the codes are packed; without it they are 0. `x.weight_g_idx` [i] is the group of each
input, if the groups are not contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.packing.float8 import compute_grid, read_blocks
from ed_models.checkpoints.packing.packed import (
    FLOAT8,
    FLOATS,
    WORD,
    Packed,
    Slices,
    covering,
    dequantize_groups,
    expect,
    read_groups,
    unpack_codes,
)
from ed_models.checkpoints.tensor_files import TensorFiles

_LAYOUT = "compressed-tensors"
#: `format` of the settings, or of one of their groups, that is read.
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "dense")
_BITS = (4, 8)


def compressed_tensors(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """The weights that have scales.

    Raises:
        CheckpointError: another format, or tensors that do not fit each other.
    """
    groups = _read_groups(settings)
    for scale in [name for name in files if name.endswith(".weight_scale")]:
        layer = scale.removesuffix("weight_scale")
        if f"{layer}weight_packed" in files:
            yield _integers(files, layer)
        else:
            yield _matrix(files, layer, groups)
    packed = [n for n in files if n.endswith(".weight_packed")]
    bare = [n for n, e in files.items() if n.endswith(".weight") and e.format in ("I8", *FLOAT8)]
    for scale in (f"{name.removesuffix('_packed')}_scale" for name in (*packed, *bare)):
        if scale not in files:
            expect(files, _LAYOUT, scale, (None, None), FLOATS)


def _read_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of layers of the settings; unsupported settings raise CheckpointError."""
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise CheckpointError(
            f"{_LAYOUT}: config_groups is not a mapping of groups: {groups!r:.80}"
        )
    formats = {group.get("format") for group in groups.values()} - {None}
    formats |= {settings.get("format")} - {None, "mixed-precision"}
    unknown = sorted(str(f) for f in formats if f not in _FORMATS)
    if unknown:
        raise CheckpointError(
            f"{_LAYOUT}: format={unknown[0]!r} is not read (known: {', '.join(_FORMATS)})"
        )
    sparse = (settings.get("sparsity_config") or {}).get("format")
    if sparse not in (None, "dense"):
        raise CheckpointError(
            f"{_LAYOUT}: sparsity_config has format={sparse!r}; sparse tensors are not read"
        )
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(
            f"{_LAYOUT}: transform_config rotates activations, which is not supported"
        )
    return list(groups.values())


def _matrix(files: TensorFiles, layer: str, groups: list[Mapping[str, Any]]) -> Packed:
    """A tensor of int8 or float8."""
    name, scale, zero, order = (
        f"{layer}{part}" for part in ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")
    )
    entry = expect(files, _LAYOUT, name, (None, None), ["I8", *FLOAT8])
    shape, grid = entry.shape, files[scale].shape
    expect(files, _LAYOUT, scale, grid, FLOATS)
    block = _block(shape, grid, groups)
    if block is None:
        raise CheckpointError(
            f"{_LAYOUT}: {scale} is {list(grid)}, and {name} {list(shape)} should have one scale, "
            "one for each row, for equal groups of a row, or for each block of a block_structure"
        )
    if zero in files:
        expect(files, _LAYOUT, zero, grid, ["I8", *FLOAT8, *FLOATS])
    zero_name = zero if zero in files else None
    entry = replace(entry, format="F32")
    parts = (scale, *({zero, order} & files.keys()))
    if order in files:
        expect(files, _LAYOUT, order, (shape[-1],), ["I32", "I64"])
        return Packed(
            name, entry, parts, partial(_read_ordered, files, name, scale, zero_name, order)
        )
    return Packed(name, entry, parts, partial(read_blocks, files, name, scale, zero_name, block))


def _block(
    shape: tuple[int, ...], grid: tuple[int, ...], groups: list[Mapping[str, Any]]
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where the scales do not fit."""
    o, i = shape[-2:]
    if math.prod(grid) == 1:
        return o, i
    if grid in ((*shape[:-1],), (*shape[:-1], 1)):
        return 1, i
    if grid[:-1] == shape[:-1] and i % grid[-1] == 0:
        return 1, i // grid[-1]
    for group in groups:
        match (group.get("weights") or {}).get("block_structure"):
            case [int(down), int(along)] if min(down, along) > 0:
                if compute_grid(shape, (down, along)) == grid:
                    return down, along
    return None


def _read_ordered(
    files: TensorFiles, name: str, scale: str, zero: str | None, order: str, index: Slices
) -> np.ndarray:
    """Float32 values of a slice [o, i] of a tensor whose groups are in any order."""
    rows, along = index
    zeros = None if zero is None else files.read(zero, (rows,))
    group = read_groups(files, order, files[scale].shape[-1], along)
    return dequantize_groups(files.read(name, index), group, zeros, files.read(scale, (rows,)))


def _integers(files: TensorFiles, layer: str) -> Packed:
    """Codes that are packed into integers."""
    codes, sizes, scale, zero, order = (
        f"{layer}weight_{part}" for part in ("packed", "shape", "scale", "zero_point", "g_idx")
    )
    rows, words = expect(files, _LAYOUT, codes, (None, None), ["I32"]).shape
    expect(files, _LAYOUT, sizes, (2,), ["I64", "I32"])
    o, i = (int(n) for n in files.read(sizes))
    bits = next((b for b in _BITS if o == rows and -(-i * b // WORD) == words), None)
    if bits is None:
        raise CheckpointError(
            f"{_LAYOUT}: {codes} is {[rows, words]}, and {sizes} says {[o, i]}: these are no codes "
            f"of {' or '.join(map(str, _BITS))} bits, which are read"
        )
    count = expect(files, _LAYOUT, scale, (o, None), FLOATS).shape[-1]
    if order in files:
        expect(files, _LAYOUT, order, (i,), ["I32", "I64"])
    elif i % count:
        raise CheckpointError(
            f"{_LAYOUT}: {scale} has {count} groups, which do not divide the {i} inputs of {codes}"
        )
    if zero in files:
        expect(files, _LAYOUT, zero, (-(-o * bits // WORD), count), ["I32"])
    entry = replace(files[codes], format="F32", shape=(o, i))
    parts = (codes, sizes, scale, *({zero, order} & files.keys()))
    read = partial(_read_integers, files, layer, (o, i), bits)
    return Packed(f"{layer}weight", entry, parts, read)


def _read_integers(
    files: TensorFiles, layer: str, shape: tuple[int, int], bits: int, index: Slices
) -> np.ndarray:
    """Float32 values of a slice [o, i] of one layer's weight."""
    rows, along = index
    codes, scale, zero, order = (
        f"{layer}weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx")
    )
    per, count = WORD // bits, files[scale].shape[-1]
    which, inside = covering(along, shape[1], per)
    values = unpack_codes(files.read(codes, (rows, which)), bits, 1)[:, inside]
    scales = files.read(scale, (rows,))
    zeros = np.full_like(scales, 2 ** (bits - 1))
    if zero in files:
        which, inside = covering(rows, shape[0], per)
        zeros = unpack_codes(files.read(zero, (which,)), bits, 0)[inside]
    if order in files:
        group = read_groups(files, order, count, along)
    else:
        group = np.arange(shape[1])[along] // (shape[1] // count)
    return dequantize_groups(values, group, zeros, scales)
