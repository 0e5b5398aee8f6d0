"""A packed tensor, and the arithmetic that its layouts share.

A weight is [.., o, i] as in torch. Its codes have scales, and perhaps zero points, that a group of
entries along `i` shares: `value = (code - zero) * scale`, in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.tensor_files import Index, TensorEntry, TensorFiles

Slices = tuple[slice, ...]
#: Formats of float8 in safetensors files.
FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
FLOATS = ("F32", "F16", "BF16")
#: Bits of an integer that contains several codes.
WORD = 32


@dataclass(frozen=True)
class Packed:
    """A tensor that is computed from other tensors.

    Attributes:
        name: of the tensor.
        entry: shape and format of its values.
        parts: names of the tensors that contain its codes, scales and other packing data.
        read: its values at slices of each dimension, in ascending order.
    """

    name: str
    entry: TensorEntry
    parts: tuple[str, ...]
    read: Callable[[Slices], np.ndarray]

    def at(self, index: Index) -> np.ndarray:
        """Its values at an index."""
        missing_dims = len(self.entry.shape) - len(index)
        slices = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
        values = self.read((*slices, *(slice(None),) * missing_dims))
        return values[tuple(0 if isinstance(i, int) else slice(None) for i in index)]


def expect(
    files: TensorFiles,
    layout: str,
    name: str,
    shape: tuple[int | None, ...],
    formats: Collection[str],
) -> TensorEntry:
    """The entry of a tensor that a layout needs.

    Args:
        layout: its name, for messages.
        shape: the required shape; None = any size.
        formats: what its numbers may be.

    Raises:
        CheckpointError: the tensor is not there, or of another shape or format.
    """
    entry = files.get(name)
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    expected_form = f"{' or '.join(formats)} [{sizes}]"
    if entry is None:
        raise CheckpointError(
            f"{layout}: {name} is not in the checkpoint, and should be {expected_form}; the "
            "checkpoint is "
            "not whole: download or save it again"
        )
    fits = len(entry.shape) == len(shape) and all(
        n in (None, size) for n, size in zip(shape, entry.shape, strict=True)
    )
    if entry.format not in formats or not fits:
        raise CheckpointError(
            f"{layout}: {name} is {entry.format} {list(entry.shape)}, and should be "
            f"{expected_form}; the "
            "checkpoint is damaged, or its quantization_config is of another one"
        )
    return entry


def covering(part: slice, size: int, unit: int) -> tuple[slice, slice]:
    """Return the units that contain the requested positions, and the positions inside them."""
    positions = range(size)[part]
    first, last = (positions[0] // unit, positions[-1] // unit + 1) if positions else (0, 0)
    start = first * unit
    return slice(first, last), slice(
        positions.start - start, positions.stop - start, positions.step
    )


def unpack_codes(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unsigned codes of words, uint8; the lowest bits of a word come first along `axis`."""
    per = WORD // bits
    words = np.moveaxis(words, axis, -1).view(np.uint32)
    out = np.empty((*words.shape, per), np.uint8)
    for place in range(per):
        out[..., place] = (words >> np.uint32(bits * place)) & np.uint32(2**bits - 1)
    *leading_sizes, count = words.shape
    return np.moveaxis(out.reshape(*leading_sizes, count * per), -1, axis)


def dequantize_groups(
    codes: np.ndarray, group: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray
) -> np.ndarray:
    """Float32 values of codes [.., o, i].

    Args:
        codes: integers or float8.
        group: of each entry along i.
        zeros: [.., o, groups]; None = 0.
        scales: [.., o, groups].
    """
    values = np.empty_like(codes, np.float32)  # with the order that the codes have in memory
    for k in np.unique(group):
        (at,) = np.nonzero(group == k)
        columns = slice(at[0], at[-1] + 1) if at[-1] - at[0] < len(at) else at
        part = codes[..., columns].astype(np.float32)
        if zeros is not None:
            part -= zeros[..., k, None].astype(np.float32)
        part *= scales[..., k, None].astype(np.float32)
        values[..., columns] = part
    return values


def read_groups(files: TensorFiles, name: str, count: int, part: slice) -> np.ndarray:
    """Return the group of each entry of a slice along i; `name` [i] contains the groups.

    Raises:
        CheckpointError: there are fewer groups.
    """
    group = np.asarray(files.read(name, (part,)))
    if group.size and not 0 <= int(group.min()) <= int(group.max()) < count:
        raise CheckpointError(
            f"{name} names groups {group.min()} to {group.max()}, and there are {count}: the "
            "checkpoint is damaged; download or save it again"
        )
    return group
