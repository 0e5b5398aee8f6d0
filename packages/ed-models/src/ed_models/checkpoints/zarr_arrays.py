"""Arrays of zarr, version 2, as TensorStore writes them: one folder per array.

The folder contains `.zarray` (JSON: shape, dtype, size of the chunks, compressor) and one file per
chunk. `tensorstore` reads and writes the chunks. The metadata are checked here first, because a
file may state any shape: an array must fit its chunks, and a chunk must fit its file.
Source: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.tensor_files import Index

METADATA_NAME = ".zarray"
_MAX_METADATA = 2**16  # bytes
_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**40  # positions of one dimension
_MAX_CHUNKS = 2**20
#: A block of zstd has at least 4 bytes and at most 128 KiB of values.
_MAX_RATIO = 2**15
_FRAME = 32  # bytes around the blocks of one file

#: Name in `.zarray` -> dtype of numpy.
_DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in ("<f4", "<f2", "<f8", "<i4", "<i8", "<i2", "<u4", "<u2")},
    **{name: np.dtype(name) for name in ("|i1", "|u1", "|b1")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class ZarrArray:
    """One array in a folder, whose metadata and files were checked.

    Attributes:
        folder: the folder with `.zarray`.
        shape: shape of the whole array.
        chunks: shape of one chunk.
        dtype: dtype of the values.
    """

    folder: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index = ()) -> np.ndarray:
        """Return `array[index]`; only the chunks of these positions are read.

        Raises:
            CheckpointError: a chunk is damaged.
        """
        import tensorstore

        try:
            array = tensorstore.open(_describe(self.folder), open=True, read=True).result()
            if array.dtype.numpy_dtype != self.dtype or array.shape != self.shape:
                raise ValueError(f"it contains {array.dtype.name} {list(array.shape)}")
            return array[index].read().result() if index else array.read().result()
        except (ValueError, IndexError, OSError) as error:
            raise CheckpointError(
                f"{self.folder} is a damaged array ({str(error)[:300]}): copy or save the folder "
                "of the model again"
            ) from error


def _describe(folder: Path) -> dict[str, object]:
    """Return the specification of an array for tensorstore."""
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}


def open_zarr(folder: Path, root: Path) -> ZarrArray:
    """Check the metadata and the files of an array, without reading values.

    Args:
        folder: the folder with `.zarray`.
        root: the folder of the model; links to other places are refused.

    Raises:
        CheckpointError: a file is missing, damaged, or outside of `root`; or the array has a format
            that is not read.
    """
    path = folder / METADATA_NAME
    if not folder.resolve().is_relative_to(root.resolve()):
        raise CheckpointError(
            f"{folder} leads out of {root}: a model has its arrays in its own folder"
        )
    check_file(path, root)
    if path.stat().st_size > _MAX_METADATA:
        raise CheckpointError(f"{path} is larger than {_MAX_METADATA} bytes: it describes no array")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        stated = {name: fields[name] for name in ("shape", "chunks", "dtype", "compressor")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!r}): copy or save the folder of the model again"
        ) from error
    shape, chunks = (_read_sizes(path, name, stated[name]) for name in ("shape", "chunks"))
    if len(shape) != len(chunks) or 0 in chunks:
        raise CheckpointError(f"{path}: chunks of {list(chunks)} do not divide {list(shape)}")
    if any(chunk > max(size, 1) for chunk, size in zip(chunks, shape, strict=True)):
        raise CheckpointError(
            f"{path}: chunks of {list(chunks)} are larger than the array, {list(shape)}"
        )
    dtype = _DTYPES.get(stated["dtype"]) if isinstance(stated["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: dtype {str(stated['dtype'])[:80]} is not read; the dtypes are "
            f"{', '.join(_DTYPES)}"
        )
    compressor = stated["compressor"]
    identifier = compressor.get("id") if isinstance(compressor, dict) else compressor
    if identifier not in (None, "zstd"):
        raise CheckpointError(
            f"{path}: compressor {str(identifier)[:80]!r} is not read; EasyDeL writes zstd"
        )
    settings = [fields.get(name) for name in ("zarr_format", "filters", "order")]
    separator = fields.get("dimension_separator", ".")
    if settings not in ([2, None, "C"], [2, None, "F"]) or separator not in (".", "/"):
        raise CheckpointError(
            f"{path}: zarr_format, filters, order are {str(settings)[:120]}, and the separator is "
            f"{str(separator)[:20]!r}; arrays of zarr 2 without filters are read"
        )
    array = ZarrArray(folder, shape, chunks, dtype)
    _check_chunks(array, root, separator, is_compressed=identifier is not None)
    return array


def _read_sizes(path: Path, name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= _MAX_DIMENSIONS:
        sizes = tuple(size for size in value if type(size) is int and 0 <= size <= _MAX_SIZE)
        if len(sizes) == len(value):
            return sizes
    raise CheckpointError(
        f"{path}: {name} {str(value)[:120]} is not a list of at most {_MAX_DIMENSIONS} sizes up to "
        f"{_MAX_SIZE}"
    )


def _check_chunks(array: ZarrArray, root: Path, separator: str, *, is_compressed: bool) -> None:
    """Check that each chunk has a file that can contain its values."""
    pairs = zip(array.shape, array.chunks, strict=True)
    grid = [-(-size // chunk) for size, chunk in pairs]
    count = math.prod(grid)
    if count > _MAX_CHUNKS:
        raise CheckpointError(
            f"{array.folder}: {count} chunks are more than {_MAX_CHUNKS}: this is no array of a "
            "model"
        )
    nbytes = math.prod(array.chunks) * array.dtype.itemsize
    for name in _list_chunks(grid, separator):
        file = array.folder / name
        check_file(file, root)
        size = file.stat().st_size
        if not (nbytes <= _MAX_RATIO * (size + _FRAME) if is_compressed else nbytes == size):
            raise CheckpointError(
                f"{file} has {size} bytes, too few for a chunk {list(array.chunks)} of "
                f"{array.dtype}: copy or save the folder of the model again"
            )


def _list_chunks(grid: list[int], separator: str) -> Iterator[str]:
    """Return the names of the files of chunks; an array without dimensions has the chunk `0`."""
    for position in product(*map(range, grid)):
        yield separator.join(map(str, position)) or "0"


def check_file(path: Path, root: Path) -> None:
    """Check that a file exists and belongs to the folder of a model.

    A link may lead to the storage of the hub's cache, whose snapshots consist of links.

    Raises:
        CheckpointError: it does not.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing or no file: copy, download or save the folder of the model again"
        )
    if not path.is_symlink():
        return
    target, cache = path.resolve(), root.resolve().parent
    is_stored = cache.name == "snapshots" and target.is_relative_to(cache.parent / "blobs")
    if not (is_stored or target.is_relative_to(root.resolve())):
        raise CheckpointError(
            f"{path} is a link out of {root}, which is not read: copy the file to this place"
        )


def write_zarr(folder: Path, values: np.ndarray) -> None:
    """Write an array in one chunk, as one process of EasyDeL on one device does.

    Raises:
        CheckpointError: the format has no name for the dtype.
    """
    import tensorstore

    if values.dtype not in _NAMES:
        raise CheckpointError(f"zarr has no name for dtype {values.dtype} of {folder.name}")
    metadata = {
        "shape": list(values.shape),
        "chunks": [max(size, 1) for size in values.shape],
        "dtype": _NAMES[values.dtype],
        "compressor": {"id": "zstd", "level": 1},
    }
    description = {**_describe(folder), "metadata": metadata}
    array = tensorstore.open(description, create=True, delete_existing=True).result()
    array.write(values).result()
