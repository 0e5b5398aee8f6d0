"""The header of a GGUF file: metadata, and the location of each tensor.

The file may come from anywhere, so each number of the header is compared with the size of the file
before memory is reserved for it. The `gguf` package does not do this: its reader trusts counts and
offsets. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

    4 bytes "GGUF", uint32 version, uint64 tensors, uint64 metadata entries
    entry:  string key, uint32 type, value
    tensor: string name, uint32 dimensions, uint64 sizes (the fastest first), uint32 type, uint64
            offset from the start of the data
    padding to the alignment, data
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ed_infra.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Key of the alignment of tensors in bytes, and the default.
ALIGNMENT_KEY, ALIGNMENT = "general.alignment", 32
_MAX_ALIGNMENT = 2**20
_MAX_HEADER = 2**29  # bytes
_MAX_TENSORS = 2**20
_MAX_ENTRIES = 2**16
_MAX_NAME = 2**16 - 1  # bytes of a key or of the name of a tensor
_MAX_DIMENSIONS = 4
_MAX_STRINGS = 2**22  # strings of an array; each is a Python object
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_NUMBERS: Mapping[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    _FLOAT: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
#: A scalar, a text, or an array: of numbers, or of texts.
GGUFValue = bool | int | float | str | np.ndarray | list[str]


class BlockFormat(NamedTuple):
    """Elements that are packed together, and their bytes."""

    name: str
    elements: int
    bytes: int


class Location(NamedTuple):
    """A tensor: the format and the shape (the fastest dimension last), and its bytes."""

    format: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GgufHeader:
    """The content of a GGUF file, without the values of the tensors.

    Attributes:
        file: path of the file.
        metadata: key -> value.
        tensors: name -> location.
        files: name -> file of a tensor in another file; of split models.
    """

    file: Path
    metadata: Mapping[str, GGUFValue]
    tensors: Mapping[str, Location]
    files: Mapping[str, Path] = field(default_factory=dict)

    def get_file(self, tensor: str) -> Path:
        """Return the file that contains a tensor."""
        return self.files.get(tensor, self.file)


def formats() -> dict[int, BlockFormat]:
    """Return the formats of tensors by their number in a file."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(k): BlockFormat(k.name, *sizes) for k, sizes in GGML_QUANT_SIZES.items()}


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of a file.

    Raises:
        CheckpointError: the file is damaged, cut short, or no GGUF file of a known version.
    """
    size = file.stat().st_size
    if size < 24:
        raise CheckpointError(f"{file} is not a whole GGUF file ({size} bytes): download it again")
    with file.open("rb") as stream:
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Cursor(file, content).header()
    finally:
        content.close()


class _Cursor:
    """Position in the header."""

    def __init__(self, file: Path, content: mmap.mmap):
        self.file, self.content = file, content
        self.at, self.size = 0, len(content)
        self.end = min(self.size, _MAX_HEADER)

    def wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {problem} (byte {self.at} of {self.size}); the file is damaged or cut "
            "short: download or convert the model again"
        )

    def header(self) -> GgufHeader:
        magic = self.bytes(4)
        if magic != MAGIC:
            raise CheckpointError(f"{self.file} is no GGUF file: it starts with {magic!r}")
        version = self.number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            byte_order = " (big-endian)" if swapped in _VERSIONS else ""
            raise CheckpointError(
                f"{self.file} is a GGUF file of version {min(version, swapped)}{byte_order}; "
                "versions "
                f"{' and '.join(map(str, _VERSIONS))}, little-endian, are read: convert the model "
                "with a current llama.cpp"
            )
        tensors = self.count("tensors", _MAX_TENSORS, 24)
        entries = self.count("metadata entries", _MAX_ENTRIES, 13)
        metadata: dict[str, GGUFValue] = {}
        for _ in range(entries):
            key = self.string("key", _MAX_NAME)
            if key in metadata:
                raise self.wrong(f"the key {key!r} is there twice")
            metadata[key] = self.value(key)
        located = self.tensors(tensors, self.alignment(metadata))
        return GgufHeader(self.file, metadata, located)

    def bytes(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise self.wrong(f"{count} bytes are missing")
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def count(self, label: str, most: int, least: int) -> int:
        """Read a number of things that need at least `least` bytes each."""
        count = self.number("<Q")
        if count > min(most, self.size // least):
            raise self.wrong(f"{count} {label}, and {min(most, self.size // least)} are possible")
        return count

    def string(self, label: str, most: int | None = None) -> str:
        length = self.number("<Q")
        if most is not None and length > most:
            raise self.wrong(f"a {label} of {length} bytes, and {most} are allowed")
        return self.bytes(length).decode(errors="replace")

    def value(self, key: str) -> GGUFValue:
        kind = self.number("<I")
        if kind == _STRING:
            return self.string("text")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _NUMBERS:
            raise self.wrong(f"{key!r} has a value of the unknown type {kind}")
        dtype = _NUMBERS[kind]
        value = np.frombuffer(self.bytes(dtype.itemsize), dtype)[0]
        if kind == _FLOAT:  # the shortest number with these bits: 1e-06, not 9.99999997e-07
            return float(str(value))
        return bool(value) if kind == _BOOL else value.item()

    def array(self, key: str) -> np.ndarray | list[str]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            if count > min(_MAX_STRINGS, (self.end - self.at) // 8):
                raise self.wrong(f"{key!r} has {count} texts")
            return [self.string("text") for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.wrong(f"{key!r} is an array of the type {kind}, which is not read")
        values = np.frombuffer(self.bytes(count * _NUMBERS[kind].itemsize), _NUMBERS[kind])
        return values.astype(np.bool_) if kind == _BOOL else values

    def alignment(self, metadata: Mapping[str, GGUFValue]) -> int:
        value = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
        if (
            not isinstance(value, int)
            or not 0 < value <= _MAX_ALIGNMENT
            or value & (value - 1)
            or isinstance(value, bool)
        ):
            raise self.wrong(
                f"{ALIGNMENT_KEY} is {value!r}, and must be a power of two up to {_MAX_ALIGNMENT}"
            )
        return value

    def tensors(self, count: int, alignment: int) -> dict[str, Location]:
        block_formats = formats()
        entries: dict[str, tuple[BlockFormat, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self.string("tensor name", _MAX_NAME)
            if name in entries:
                raise self.wrong(f"the tensor {name!r} is there twice")
            dimensions = self.number("<I")
            if dimensions > _MAX_DIMENSIONS:
                raise self.wrong(f"{name!r} has {dimensions} dimensions")
            sizes = [self.number("<Q") for _ in range(dimensions)]
            kind, offset = self.number("<I"), self.number("<Q")
            if kind not in block_formats:
                raise CheckpointError(
                    f"{self.file}: tensor {name!r} has the format {kind}, which the installed "
                    "gguf package does not know: update gguf, or convert the model again"
                )
            form = block_formats[kind]
            if (sizes[0] if sizes else 1) % form.elements:
                raise self.wrong(
                    f"{name!r} has rows of {sizes[0] if sizes else 1} elements, no multiple of "
                    f"{form.elements} ({form.name})"
                )
            entries[name] = form, tuple(reversed(sizes)), offset
        start = -(-self.at // alignment) * alignment
        located: dict[str, Location] = {}
        for name, (form, shape, offset) in entries.items():
            length = math.prod(shape) // form.elements * form.bytes
            first = start + offset
            if offset % alignment or first + length > self.size:
                raise self.wrong(
                    f"{name!r} ({form.name} {list(shape)}) is at {first}..{first + length}, which "
                    f"is outside the file or no multiple of {alignment}"
                )
            located[name] = Location(form.name, shape, first, first + length)
        last, end = "", start
        for name, tensor in sorted(located.items(), key=lambda item: item[1].start):
            if tensor.start < end and tensor.stop > tensor.start:
                raise self.wrong(f"the tensors {last!r} and {name!r} overlap")
            last, end = (name, tensor.stop) if tensor.stop > end else (last, end)
        return located


def get_text_value(
    metadata: Mapping[str, GGUFValue], key: str, default: str | None = None
) -> str | None:
    """Return a text of the metadata; `default` if the key is absent.

    Raises:
        CheckpointError: the value is no text.
    """
    value = metadata.get(key, default)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"the GGUF key {key} is {value!r}, and must be a text")
    return value


def get_text_values(metadata: Mapping[str, GGUFValue], key: str) -> list[str]:
    """Return an array of texts; an empty list if the key is absent.

    Raises:
        CheckpointError: the value is no array of texts.
    """
    value = metadata.get(key, [])
    if isinstance(value, np.ndarray) and not value.size:
        return []
    if not isinstance(value, list):
        raise CheckpointError(f"the GGUF key {key} must be an array of texts")
    return value


def numbers(metadata: Mapping[str, GGUFValue], key: str) -> Sequence[Any]:
    """Return an array of numbers; an empty list if the key is absent.

    Raises:
        CheckpointError: the value is no array of numbers.
    """
    value = metadata.get(key, [])
    if isinstance(value, list) and not value:
        return []
    if not isinstance(value, np.ndarray):
        raise CheckpointError(f"the GGUF key {key} must be an array of numbers")
    return value.tolist()
