"""AWQ in its "gemm" layout, as AutoAWQ writes it (Lin et al. 2023).

A layer [o, i] with codes of 4 bits, eight in an int32, in groups of `group_size` inputs:
`qweight` int32 [i, o / 8], `qzeros` int32 [groups, o / 8], `scales` [groups, o]. The eight outputs
0 to 7 are stored in a word, from the lowest bits up, in the order 0, 2, 4, 6, 1, 3, 5, 7.
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
    unpack_codes,
)
from ed_models.checkpoints.tensor_files import TensorFiles

_LAYOUT = "AWQ"
_BITS = 4
PER = WORD // _BITS
#: The position of each of the eight outputs in a word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """The layers whose weights are codes.

    Raises:
        CheckpointError: another variant of the format, or tensors that do not fit each other.
    """
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = settings.get("bits", settings.get("w_bit"))
    if version != "gemm" or bits != _BITS:
        raise CheckpointError(
            f"{_LAYOUT}: version={version!r} with bits={bits!r} is not read: AutoAWQ's 'gemm' with "
            f"{_BITS} bits is; use a checkpoint with that layout"
        )
    group_size = settings.get("group_size", settings.get("q_group_size", -1))
    if not isinstance(group_size, int) or group_size == 0 or group_size < -1:
        raise CheckpointError(f"{_LAYOUT}: group_size is {group_size!r}; -1 means one group")
    for codes in [name for name in files if name.endswith(".qweight")]:
        layer = codes.removesuffix("qweight")
        scales, zeros = f"{layer}scales", f"{layer}qzeros"
        inputs, words = expect(files, _LAYOUT, codes, (None, None), ["I32"]).shape
        size = inputs if group_size == -1 else group_size
        count = math.ceil(inputs / size)
        expect(files, _LAYOUT, zeros, (count, words), ["I32"])
        expect(files, _LAYOUT, scales, (count, words * PER), FLOATS)
        entry = replace(files[codes], format="F32", shape=(words * PER, inputs))
        read = partial(_read, files, layer, size)
        yield Packed(f"{layer}weight", entry, (codes, scales, zeros), read)


def _read(files: TensorFiles, layer: str, size: int, index: Slices) -> np.ndarray:
    """Float32 values of a slice [o, i] of one layer's weight."""
    rows, along = index
    inputs, words = files[f"{layer}qweight"].shape
    which, inside = covering(rows, words * PER, PER)

    def codes(part: str, at: slice) -> np.ndarray:
        stored = unpack_codes(files.read(f"{layer}{part}", (at, which)), _BITS, 1)
        in_order = stored.reshape(len(stored), stored.shape[1] // PER, PER)[..., _PLACES]
        return in_order.reshape(stored.shape)[:, inside].T

    scales = files.read(f"{layer}scales", (slice(None), rows)).T
    group = np.arange(inputs)[along] // size
    return dequantize_groups(codes("qweight", along), group, codes("qzeros", slice(None)), scales)
