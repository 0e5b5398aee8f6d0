"""Read `pytorch_model.bin` without running code: a pickle of tensor descriptions, and raw bytes.

torch writes a zip file with uncompressed members: `data.pkl` describes how each tensor is stored
in which member of `data/`. The pickle is read by an unpickler that knows the handful of names that
torch writes there, and refuses every other; so a slice of a tensor is read from the file like one
of a safetensors file. Sources: torch/serialization.py, torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.directory import ENDING, find_weights_file
from ed_models.checkpoints.gguf.files import GgufFiles
from ed_models.checkpoints.orbax_arrays import ORBAX_METADATA
from ed_models.checkpoints.tensor_files import (
    DTYPES,
    EASYDEL_INDEX,
    TensorEntry,
    TensorFiles,
    read_weight_map,
    with_variant,
)

PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_MAX_PICKLE = 64 * 2**20  # bytes that describe tensors
_MAX_TENSORS = 1_000_000
_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "UntypedStorage": "",
}
_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def open_tensors(
    directory: Path, *, variant: str | None = None, allow_pickle: bool = False
) -> TensorFiles:
    """Open the weights of a directory: safetensors, torch's pickles where these are allowed, the
    file that the directory was made for (GGUF, CTranslate2, Orbax), or the arrays that EasyDeL
    saved.

    Args:
        directory: a local directory.
        variant: part of the files' names, as in `model.fp16.safetensors`.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors files.

    Raises:
        CheckpointError: there are no weights, a file is damaged or missing, or a pickle refers to
            anything else than tensors.
    """
    file = find_weights_file(directory)
    if file is not None and file.suffix == ENDING:
        return GgufFiles.open(file, variant)
    if file is not None and file.name == ORBAX_METADATA:
        from ed_models.checkpoints.maxtext_folder import MaxTextFiles

        return MaxTextFiles.open_item(file.parent, directory, variant)
    if file is not None:
        from ed_models.checkpoints.ctranslate2_files import CTranslate2Files

        return CTranslate2Files.open(file, variant)
    if (directory / EASYDEL_INDEX).is_file() and not any(directory.glob("*.safetensors")):
        from ed_models.checkpoints.easydel_folder import EasyDeLFiles

        return EasyDeLFiles.open(directory, variant)
    index = directory / with_variant(PICKLED_INDEX, variant)
    single = directory / with_variant(PICKLED, variant)
    has_pickles = index.is_file() or single.is_file()
    if not (allow_pickle and has_pickles) or any(directory.glob("*.safetensors")):
        return TensorFiles.open(directory, variant)
    if not index.is_file():
        return TensorFiles(read_pickled(single))
    weight_map = read_weight_map(index)
    pickles = {name: read_pickled(directory / name) for name in sorted(set(weight_map.values()))}
    lost = [name for name, file in weight_map.items() if name not in pickles[file]]
    if lost:
        raise CheckpointError(
            f"{index}: {len(lost)} tensors are not in the files that it names for them: "
            f"{', '.join(f'{n} ({weight_map[n]})' for n in lost[:5])}"
        )
    return TensorFiles({name: pickles[file][name] for name, file in weight_map.items()})


def read_pickled(file: Path) -> dict[str, TensorEntry]:
    """Return the location of each tensor of a file, without reading the values.

    Raises:
        CheckpointError: the file is damaged, has another format, or refers to code.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            name = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
            if name is None:
                raise CheckpointError(f"{file} is a zip file, but none that torch wrote")
            root = name.removesuffix("data.pkl")
            if archive.getinfo(name).file_size > _MAX_PICKLE:
                raise CheckpointError(f"{file}: its description of tensors is over 64 MiB")
            order = f"{root}byteorder"
            if order in archive.namelist() and archive.open(order).read(16) != b"little":
                raise CheckpointError(f"{file} was written by a big-endian machine")
            tensors = _unpickle_object(file, archive.read(name))
            places = {
                info.filename.removeprefix(f"{root}data/"): _find_byte_range(file, info)
                for info in archive.infolist()
                if info.filename.startswith(f"{root}data/")
            }
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{file} is no file of torch >= 1.6, or it is cut short; download it again, or convert "
            "it once with torch: torch.save(torch.load(FILE, weights_only=True), NEW_FILE)"
        ) from None
    if not isinstance(tensors, dict) or len(tensors) > _MAX_TENSORS:
        raise CheckpointError(f"{file} holds a {type(tensors).__name__}, not tensors by name")
    return {name: _entry(file, name, tensor, places) for name, tensor in tensors.items()}


class _Storage(NamedTuple):
    format: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Kind(NamedTuple):
    """A class or a dtype of torch, which the pickle only names."""

    format: str


def _rebuild_v2(storage: _Storage, offset: int, shape: Any, strides: Any, *_: object) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_v3(
    storage: _Storage,
    offset: int,
    shape: object,
    strides: object,
    grad: object,
    hooks: object,
    dtype: _Kind,
) -> _Tensor:
    return _rebuild_v2(_Storage(dtype.format, storage.key), offset, shape, strides)


def _rebuild_parameter(tensor: _Tensor, *_: object) -> _Tensor:
    return tensor


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): _Kind(fmt) for name, fmt in (_STORAGES | _DTYPES).items()},
    ("torch.storage", "UntypedStorage"): _Kind(""),
}


class _Unpickler(pickle._Unpickler):
    """Knows the names of `_KNOWN` and no other, so nothing that it calls does anything.

    The one in Python: a number in the file makes the one in C allocate memory.
    """

    def __init__(self, file: Path, data: bytes):
        super().__init__(io.BytesIO(data))
        self._file = file

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        known_class = _KNOWN.get((module, name))
        if known_class is None:
            raise CheckpointError(
                f"{self._file} refers to {module}.{name}, which no file of weights needs; it was "
                "not run. Do not load this file by other means unless you trust its author"
            )
        return known_class

    def persistent_load(self, pid: Any) -> _Storage:
        kind, of, key, *_ = pid
        if kind != "storage" or not isinstance(of, _Kind):
            raise CheckpointError(f"{self._file} refers to {kind!r}, which is no storage")
        return _Storage(of.format, str(key))


def _unpickle_object(file: Path, data: bytes) -> object:
    try:
        return _Unpickler(file, data).load()
    except CheckpointError:
        raise
    except Exception as error:  # bytes of anybody's: each of its steps may fail in its own way
        raise CheckpointError(
            f"{file}: its description of tensors is damaged ({error!r})"
        ) from error


def _find_byte_range(file: Path, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the first byte and the end of a member, which must not be compressed."""
    with file.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(30)
    if info.compress_type != zipfile.ZIP_STORED or len(header) < 30:
        raise CheckpointError(f"{file}: {info.filename} is compressed; torch stores tensors plain")
    names = sum(struct.unpack("<HH", header[26:30]))
    start = info.header_offset + 30 + names
    return start, start + info.file_size


def _entry(
    file: Path, name: object, tensor: object, places: dict[str, tuple[int, int]]
) -> TensorEntry:
    if not isinstance(tensor, _Tensor):
        raise CheckpointError(
            f"{file}: {name!r} is a {type(tensor).__name__}, not a tensor; a file of weights is a "
            "plain mapping of names to tensors (a training checkpoint holds one under a name)"
        )
    size = DTYPES[tensor.storage.format].itemsize if tensor.storage.format else 0
    begin, end = places.get(tensor.storage.key, (0, 0))
    start = begin + tensor.offset * size
    stop = start + math.prod(tensor.shape) * size
    strides, step = [], 1
    for n in reversed(tensor.shape):
        strides.insert(0, step)
        step *= n
    is_contiguous = all(
        n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.strides, strides, strict=True)
    )
    if not size or min((*tensor.shape, tensor.offset)) < 0 or stop > end or not is_contiguous:
        raise CheckpointError(
            f"{file}: tensor {name!r} {list(tensor.shape)} does not lie in one piece in bytes "
            f"{begin}..{end}; the file is damaged, or the tensor was saved as a view"
        )
    return TensorEntry(file, tensor.storage.format, tensor.shape, start, stop)
