"""The tensors of GGUF files as tensors of a checkpoint: decoded when they are read.

A slice is decoded to float32 and converted to the parameter's dtype, so only that slice is in
memory unquantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.architecture import Architecture, with_bodies
from ed_models.checkpoints.gguf.blocks import PLAIN, check_block_format, map_file, read_slice
from ed_models.checkpoints.gguf.header import GgufHeader, Location, read_gguf_header
from ed_models.checkpoints.gguf.rope import TENSORS as ROPE_TENSORS
from ed_models.checkpoints.gguf.table import row_of_file, rules_of_file
from ed_models.checkpoints.packing.packed import Packed
from ed_models.checkpoints.tensor_files import (
    Computed,
    Index,
    JoinedFiles,
    TensorEntry,
    TensorFiles,
)
from ed_models.weights.blocks import ArchitectureFields, Shape, Shapes
from ed_models.weights.rules import Rule, ignore

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 4096
#: Tensors that a body alone does not need.
_HEAD = ("output.weight", "output.bias")


class GgufFiles(JoinedFiles):
    """The tensors of one model."""

    def __init__(self, row: Architecture, header: GgufHeader, tensors: Mapping[str, Computed]):
        super().__init__(TensorFiles({}), tensors)
        self.row, self.header = row, header

    @classmethod
    def open(cls, directory: str | Path, variant: str | None = None) -> GgufFiles:
        """Open a file, and the other parts of a model that is split over files.

        Args:
            directory: the path of the file.
            variant: unused: GGUF files have no variants.

        Raises:
            CheckpointError: a file is damaged or missing, or the architecture is not supported.
        """
        if variant is not None:
            raise CheckpointError(f"{directory} is a GGUF file and has no variant {variant!r}")
        header = read_parts(Path(directory))
        row, _ = row_of_file(header)
        tensors, data = {}, cache(map_file)
        for name, location in header.tensors.items():
            if name not in ROPE_TENSORS:
                check_block_format(name, location.format)
                tensors[name] = _build_tensor(header, name, location, row, data)
        return cls(row, header, tensors)

    def rules(self, rules: Sequence[Rule], config: ArchitectureFields) -> Sequence[Rule]:
        """Return the rules of the architecture; those of the model's class for other parameters."""
        file_rules = rules_of_file(self.row, self.header)
        return (*with_bodies(file_rules), *rules, *map(ignore, _HEAD))

    def changes(self, name: str) -> bool:
        """Return whether the values of Hugging Face differ from those of a tensor."""
        return _change(name, self.row) is not None

    def reshape_tensors(self, shapes: Shapes, config: ArchitectureFields) -> GgufFiles:
        """Return the files with the dimensions that the rules expect."""
        changed = {}
        for name, shape in shapes.items():
            tensor = self._computed.get(name)
            if tensor is None:
                continue
            stored = tensor.entry.shape
            if stored == shape or math.prod(stored) != math.prod(shape):
                continue
            if stored == self.row.reshaped(name, shape, config) or _equal_sizes(stored, shape):
                changed[name] = _reshape_tensor(tensor, shape)
        return GgufFiles(self.row, self.header, {**self._computed, **changed})


def read_parts(file: Path) -> GgufHeader:
    """Read the header of a file, and of the other parts of a split model.

    Raises:
        CheckpointError: a part is missing, or two parts contain one tensor.
    """
    first = read_gguf_header(file)
    match = _PART.fullmatch(file.name)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    if match is None or int(match[3]) != count or count > _MOST_PARTS:
        raise CheckpointError(
            f"{file} is one of {count} parts of a model, and its name must end with "
            f"-00001-of-{count:05d}.gguf"
        )
    names = [f"{match[1]}-{part:05d}-of-{match[3]}.gguf" for part in range(1, count + 1)]
    absent = [name for name in names if not (file.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {count} parts of the model are not in {file.parent}: "
            f"{', '.join(absent[:5])}; download them"
        )
    parts = [read_gguf_header(file.parent / name) for name in names]
    tensors: dict[str, Location] = {}
    files: dict[str, Path] = {}
    for part in parts:
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise CheckpointError(f"tensor {min(twice)!r} is in two parts of {file}")
        tensors |= part.tensors
        files |= dict.fromkeys(part.tensors, part.file)
    return replace(parts[0], tensors=tensors, files=files)


def _build_tensor(
    header: GgufHeader,
    name: str,
    location: Location,
    row: Architecture,
    data: Callable[[Path], np.ndarray],
) -> Computed:
    file = header.get_file(name)
    form = location.format if location.format in PLAIN else "F32"
    change = _change(name, row)
    form = "F32" if change is not None else form
    entry = TensorEntry(file, form, location.shape, location.start, location.stop)

    def read(slices: tuple[slice, ...]) -> np.ndarray:
        values = read_slice(data(file), location, slices)
        return values if change is None else change(np.asarray(values, np.float32))

    return Computed(entry, Packed(name, entry, (), read).at)


def _change(name: str, row: Architecture) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function that gives the values of Hugging Face."""
    if row.shifted and name.endswith("norm.weight"):
        return lambda values: values - np.float32(1)
    if name.endswith(".ssm_a"):
        return lambda values: np.log(-values)
    return None


def _reshape_tensor(tensor: Computed, shape: Shape) -> Computed:
    """Return a tensor with other dimensions; the last one is that of the file, or all is read."""
    entry = replace(tensor.entry, shape=shape)

    def read(index: Index) -> np.ndarray:
        return tensor.read(()).reshape(shape)[index]

    def rows(index: Index) -> np.ndarray:
        """Read only the matrices of the file that the rows of the index touch."""
        first, *other_index = index
        size = shape[0] // tensor.entry.shape[0]
        row_range = range(shape[0])[first] if isinstance(first, slice) else range(first, first + 1)
        if not row_range:
            return read(index)
        low, high = row_range[0] // size, row_range[-1] // size + 1
        part = tensor.read((slice(low, high),)).reshape(-1, *shape[1:])
        start = row_range.start - low * size
        at = slice(start, row_range.stop - low * size, row_range.step)
        return part[(at if isinstance(first, slice) else start, *other_index)]

    is_split = len(tensor.entry.shape) == len(shape) + 1
    return Computed(entry, rows if is_split else read)


def _equal_sizes(stored: Shape, shape: Shape) -> bool:
    """Whether two shapes differ only by dimensions of size 1."""
    return [n for n in stored if n != 1] == [n for n in shape if n != 1]
