"""GPTQ, as AutoGPTQ and GPTQModel write it (Frantar et al. 2022).

A layer [o, i] with codes of `bits` bits, several in an int32, the lowest bits first:

- `qweight` int32 [i * bits / 32, o]: the codes of one column of inputs after another
- `scales` [groups, o], `qzeros` int32 [groups, o * bits / 32]
- `g_idx` int32 [i]: the group of each input, in any order where `desc_act` is set; without it
  groups are `group_size` inputs each, one after another

The first version of the format stores zero points less one, modulo 2^bits; the second
(`checkpoint_format: gptq_v2`) stores them unchanged. Some writers of the second call it the
first: symmetric codes, whose zero point is always 2^(bits - 1), show which it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.packing.packed import (
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

_LAYOUT = "GPTQ"
_BITS = (2, 4, 8)
#: `checkpoint_format` -> the offset of stored zero points.
_VERSIONS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}


def gptq(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """The layers whose weights are codes.

    Raises:
        CheckpointError: another variant of the format, or tensors that do not fit each other.
    """
    version = str(settings.get("checkpoint_format") or "gptq")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{_LAYOUT}: checkpoint_format={version!r} is made for one kernel and not read (known: "
            f"{', '.join(_VERSIONS)}); use a checkpoint in one of these"
        )
    for codes in [name for name in files if name.endswith(".qweight")]:
        layer = codes.removesuffix("qweight")
        scales, zeros, order = (f"{layer}{part}" for part in ("scales", "qzeros", "g_idx"))
        words, o = expect(files, _LAYOUT, codes, (None, None), ["I32"]).shape
        count = expect(files, _LAYOUT, scales, (None, o), FLOATS).shape[0]
        bits = _bits(files, codes, order, settings)
        expect(files, _LAYOUT, zeros, (count, math.ceil(o * bits / WORD)), ["I32"])
        inputs = words * WORD // bits
        size = _group_size(settings, inputs)
        if order in files:
            expect(files, _LAYOUT, order, (inputs,), ["I32", "I64"])
        elif count != math.ceil(inputs / size):
            raise CheckpointError(
                f"{_LAYOUT}: {scales} has {count} groups, and {inputs} inputs in groups of {size} "
                f"(group_size) are {math.ceil(inputs / size)}; {order} could define more, but "
                "the checkpoint lacks it"
            )
        read = partial(
            _read,
            files,
            layer,
            bits=bits,
            size=size,
            added=_VERSIONS[version],
            symmetric=bool(settings.get("sym")),
        )
        entry = replace(files[codes], format="F32", shape=(o, inputs))
        parts = tuple({codes, scales, zeros, order} & files.keys())
        yield Packed(f"{layer}weight", entry, parts, read)


def _bits(files: TensorFiles, codes: str, order: str, settings: Mapping[str, Any]) -> int:
    """Return the bits of a code, from the shapes if layers may differ (`dynamic`)."""
    bits = settings.get("bits")
    if settings.get("dynamic") and order in files and files[order].shape[0]:
        bits = files[codes].shape[0] * WORD // files[order].shape[0]
    if bits not in _BITS:
        raise CheckpointError(
            f"{_LAYOUT}: {codes} has codes of bits={bits!r}, which are not read (known: "
            f"{', '.join(map(str, _BITS))})"
        )
    return bits


def _group_size(settings: Mapping[str, Any], inputs: int) -> int:
    size = settings.get("group_size", -1)
    if not isinstance(size, int) or size == 0 or size < -1:
        raise CheckpointError(f"{_LAYOUT}: group_size is {size!r}; -1 means one group, else inputs")
    return inputs if size == -1 else size


def _read(
    files: TensorFiles,
    layer: str,
    index: Slices,
    *,
    bits: int,
    size: int,
    added: int,
    symmetric: bool,
) -> np.ndarray:
    """Float32 values of a slice [o, i] of one layer's weight."""
    rows, along = index
    per = WORD // bits
    words, o = files[f"{layer}qweight"].shape
    count = files[f"{layer}scales"].shape[0]
    which, inside = covering(along, words * per, per)
    codes = unpack_codes(files.read(f"{layer}qweight", (which, rows)), bits, 0)[inside]
    which, inside = covering(rows, o, per)
    stored = unpack_codes(files.read(f"{layer}qzeros", (slice(None), which)), bits, 1)[:, inside]
    if symmetric and stored.size and (stored == 2 ** (bits - 1)).all():
        added = 0
    zeros = (stored + np.uint8(added)) & np.uint8(2**bits - 1)
    scales = files.read(f"{layer}scales", (slice(None), rows))
    order = f"{layer}g_idx"
    if order in files:
        group = read_groups(files, order, count, along)
    else:
        group = np.arange(words * per)[along] // size
    return dequantize_groups(codes.T, group, zeros.T, scales.T)
