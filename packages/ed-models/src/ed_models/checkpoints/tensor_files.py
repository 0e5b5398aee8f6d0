"""Read safetensors directories: every dtype, any slice, nothing else of the file.

The `safetensors` library reads bfloat16 slices but not float8 ones in numpy, and its jax loader
puts whole tensors on the default device. The format is a JSON header and raw little-endian bytes
(https://huggingface.co/docs/safetensors), so a memory map is all that is needed: a slice touches
only the pages that hold it.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from ed_infra.errors import CheckpointError, did_you_mean

from ed_models.weights.blocks import ArchitectureFields, Shapes
from ed_models.weights.rules import Rule

#: What part of a tensor is read.
Index = tuple[int | slice, ...]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: The list of arrays in a folder that EasyDeL saved (`ed_models.checkpoints.easydel_folder`).
EASYDEL_INDEX = "tensorstore_index.json"

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
}
PACKED_BITS = {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}  # elements are packed, low bits first
_MAX_HEADER = 100_000_000  # bytes; the library's own limit
_KEPT = 2**25  # bytes of a file's pages that stay in memory after they were read


@dataclass(frozen=True)
class TensorEntry:
    """The location of one tensor: its file, its type and its bytes `[start, stop)` in that file."""

    file: Path
    format: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.format]


class TensorFiles(Mapping[str, TensorEntry]):
    """The tensors of one directory, as a mapping from name to `TensorEntry`; `read` returns values.

    Files are mapped on first use and stay mapped until the object is dropped.
    """

    def __init__(self, entries: Mapping[str, TensorEntry]):
        self._entries = dict(entries)
        self._maps: dict[Path, mmap.mmap] = {}
        self._touched = 0

    @classmethod
    def open(cls, directory: str | Path, variant: str | None = None) -> TensorFiles:
        """Open `model.safetensors`, the files of `model.safetensors.index.json`, or every
        `*.safetensors` of the directory where neither is there.

        Args:
            directory: a local directory.
            variant: the same for `model.<variant>.safetensors` and its index; these must be there.

        Raises:
            CheckpointError: there are no weights, a file of the index is not there, or a header
                is damaged, or lacks a tensor that the index lists.
        """
        directory = Path(directory)
        index = directory / with_variant(INDEX_NAME, variant)
        if index.is_file():
            return cls(_read_index(index))
        single = directory / with_variant(SINGLE_NAME, variant)
        all_files = sorted(directory.glob("*.safetensors"))
        beside = [file for file in all_files if file.name.startswith("adapter_model")]
        files = (
            [single] if single.is_file() else [f for f in all_files if f not in beside] or beside
        )
        if variant is not None and files != [single]:
            raise CheckpointError(
                f"{directory} has no weights of variant {variant!r} (neither {single.name} nor "
                f"{index.name}; there are: {', '.join(f.name for f in files) or 'none'})"
            )
        if not files:
            raise CheckpointError(_no_weights(directory))
        entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in read_header(file).items():
                if name in entries:
                    raise CheckpointError(
                        f"tensor {name!r} is in two files, {entries[name].file.name} and "
                        f"{file.name} of {directory}, and no {INDEX_NAME} selects one of them"
                    )
                entries[name] = entry
        return cls(entries)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def rename_tensors(self, names: Mapping[str, str | None]) -> TensorFiles:
        """The same files, with other names for some tensors; None drops a tensor."""
        new = ((names.get(name, name), entry) for name, entry in self._entries.items())
        return TensorFiles({name: entry for name, entry in new if name is not None})

    def add_tensors(self, computed: Mapping[str, Computed]) -> TensorFiles:
        """The same files, and computed tensors; those of equal names are read in their place."""
        return JoinedFiles(self, computed)

    def rules(self, rules: Sequence[Rule], config: ArchitectureFields) -> Sequence[Rule]:
        """Return the weight rules of a model in these files, from those of its class."""
        return rules

    def reshape_tensors(self, shapes: Shapes, config: ArchitectureFields) -> TensorFiles:
        """Return the files with the dimensions that the rules expect."""
        return self

    def read_adapters(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the low-rank adapters beside the tensors: module -> A [i, r] and B [r, o]."""
        return {}

    @property
    def directory(self) -> Path:
        """Where the first file is, for messages."""
        return next((entry.file.parent for entry in self._entries.values()), Path())

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return `tensor[index]` as a read-only view of the mapped file (no bytes are read yet).

        Packed formats (float4, float6) are unpacked whole first: a copy.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"no tensor {name!r} here{did_you_mean(name, self._entries)}")
        if entry.start == entry.stop:
            return np.zeros(entry.shape, entry.dtype)[index]
        data = self._map(entry.file)[entry.start : entry.stop]
        self._forget(entry.stop - entry.start)
        bits = PACKED_BITS.get(entry.format)
        if bits is None:
            flat = data.view(entry.dtype)
        else:
            flat = _unpack(data, bits, math.prod(entry.shape)).view(entry.dtype)
        return flat.reshape(entry.shape)[index]

    def read_bytes(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor as they are stored: uint8, without unpacking."""
        entry = self[name]
        if entry.start == entry.stop:
            return np.zeros(0, np.uint8)
        self._forget(entry.stop - entry.start)
        return self._map(entry.file)[entry.start : entry.stop]

    def _map(self, file: Path) -> np.ndarray:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[file], np.uint8)

    def _forget(self, size: int) -> None:
        """Let go of pages that were read before, so that a process does not hold whole files.

        Views stay valid: an access reads the values again.
        """
        self._touched += size
        if self._touched > _KEPT and hasattr(mmap, "MADV_DONTNEED"):
            for mapped in [*self._maps.values()]:  # threads may map other files
                mapped.madvise(mmap.MADV_DONTNEED)
            self._touched = size


class Computed(NamedTuple):
    """A tensor that is computed from stored tensors: its entry, and a function for its values."""

    entry: TensorEntry
    read: Callable[[Index], np.ndarray]


class JoinedFiles(TensorFiles):
    """Tensor files with additional or replaced tensors that are computed."""

    def __init__(self, files: TensorFiles, computed: Mapping[str, Computed]):
        super().__init__({**files, **{name: tensor.entry for name, tensor in computed.items()}})
        self._files, self._computed = files, dict(computed)

    def rename_tensors(self, names: Mapping[str, str | None]) -> TensorFiles:
        """The same tensors, with other names for some; None drops a tensor."""
        moved = ((names.get(name, name), tensor) for name, tensor in self._computed.items())
        computed = {name: tensor for name, tensor in moved if name is not None}
        return JoinedFiles(self._files.rename_tensors(names), computed)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return `tensor[index]`."""
        tensor = self._computed.get(name)
        return self._files.read(name, index) if tensor is None else tensor.read(index)

    def read_bytes(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor, of a computed one those of its values."""
        if name not in self._computed:
            return self._files.read_bytes(name)
        values = self.read(name).astype(self[name].dtype, copy=False)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def compute_arrays(files: TensorFiles, values: Mapping[str, np.ndarray]) -> dict[str, Computed]:
    """Values in memory, of tensors that the files lack."""
    formats = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: Computed(
            TensorEntry(files.directory, formats[value.dtype], value.shape, 0, value.nbytes),
            value.__getitem__,
        )
        for name, value in values.items()
        if name not in files
    }


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Parse one file's header and check it against the file's length.

    Raises:
        CheckpointError: the file is cut short, is no safetensors file, or its offsets are wrong.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{file} is not a whole safetensors file ({size} bytes); download or save it again"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + length, value) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: the safetensors header is damaged ({error})") from error
    last, end = "", 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        bits = math.prod(entry.shape) * (PACKED_BITS.get(entry.format) or entry.dtype.itemsize * 8)
        if (
            not 8 + length <= entry.start <= entry.stop <= size
            or min(entry.shape, default=0) < 0
            or bits != 8 * (entry.stop - entry.start)
        ):
            raise CheckpointError(
                f"{file}: tensor {name!r} ({entry.format} {list(entry.shape)}) does not fit its "
                f"bytes {entry.start}..{entry.stop} of {size}; the file is damaged or cut short"
            )
        if entry.start < end:
            raise CheckpointError(
                f"{file}: tensors {last!r} and {name!r} overlap at bytes {entry.start}..{end}; the "
                "file is damaged; download or save it again"
            )
        last, end = name, entry.stop
    return entries


def _entry(file: Path, offset: int, value: Mapping) -> TensorEntry:
    if value["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{file}: unknown safetensors dtype {value['dtype']!r} (known: {', '.join(DTYPES)})"
        )
    start, stop = (operator.index(x) for x in value["data_offsets"])
    shape = tuple(operator.index(x) for x in value["shape"])
    return TensorEntry(file, value["dtype"], shape, offset + start, offset + stop)


def with_variant(name: str, variant: str | None) -> str:
    """`model.safetensors` -> `model.fp16.safetensors`, as `transformers` names variants."""
    if variant is None:
        return name
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{variant}.{ending}"


def read_weight_map(index: Path) -> dict[str, str]:
    """Read an index: tensor name -> file name in the directory of the index.

    Raises:
        CheckpointError: the index is damaged, names a file elsewhere, or one that is not there.
    """
    if index.stat().st_size > _MAX_HEADER:
        raise CheckpointError(f"{index} is larger than {_MAX_HEADER} bytes; that is no index")
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        names = sorted(set(weight_map.values()))
        foreign = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged ({error!r})") from error
    if foreign:
        raise CheckpointError(
            f"{index} names files outside its folder, which are not read: {', '.join(foreign[:5])}"
        )
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(absent)} are not there: "
            f"{', '.join(absent[:5])}; download or save the model again"
        )
    return weight_map


def _read_index(path: Path) -> dict[str, TensorEntry]:
    weight_map = read_weight_map(path)
    headers = {name: read_header(path.parent / name) for name in sorted(set(weight_map.values()))}
    lost = [name for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        raise CheckpointError(
            f"{path}: {len(lost)} tensors are not in the files that it names for them: "
            f"{', '.join(f'{n} ({weight_map[n]})' for n in lost[:5])}"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _unpack(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Spread packed `bits`-wide codes over one byte each (uint8 [count])."""
    codes = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
    return np.packbits(codes, axis=1, bitorder="little").reshape(count)


def _no_weights(directory: Path) -> str:
    pickled = sorted(p.name for p in directory.glob("*.bin")) + sorted(
        p.name for p in directory.glob("*.pt*")
    )
    if pickled:
        return (
            f"{directory} holds only pickled weights ({pickled[0]}), which are not read unasked "
            "because a pickle can run code: allow_pickle=True reads pytorch_model.bin and runs "
            "nothing of it; or convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return f"no *.safetensors file in {directory}"


# Whether an array has only finite numbers, at the speed of a copy.
#
# The bits of a float order like a whole number: with the sign bit clear, infinity and NaN are the
# largest signed numbers; with the sign bit set, the largest unsigned ones. Two maxima decide.


#: Name of a dtype -> bits of its first number that is not finite, the sign bit clear.
_FIRST = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}
_BLOCK = 2**20  # bytes: the second maximum reads from the processor's cache


def is_finite(values: np.ndarray) -> bool:
    """Return whether no number is NaN or infinite; whole numbers always are finite."""
    name, width = values.dtype.name, values.dtype.itemsize
    if name == "float8_e8m0fnu":
        return not (values.view(np.uint8) == 0xFF).any()
    if name not in _FIRST:
        return True
    signed, first = values.view(f"i{width}"), _FIRST[name]
    unsigned, first_negative = values.view(f"u{width}"), first | 1 << 8 * width - 1
    if values.ndim == 0 or values.nbytes <= _BLOCK or not values.flags.c_contiguous:
        parts = [slice(None)] if values.ndim else [()]
    else:
        signed, unsigned = signed.reshape(-1), unsigned.reshape(-1)
        step = _BLOCK // width
        parts = [slice(start, start + step) for start in range(0, values.size, step)]
    return all(
        signed[part].max(initial=0) < first and unsigned[part].max(initial=0) < first_negative
        for part in parts
    )
