"""Write safetensors files as Hugging Face does: shards of a given size, and an index.

One tensor is in memory at a time: the header needs only names, types and shapes, so it is written
first and the values follow as they come. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError

from ed_models.checkpoints.tensor_files import DTYPES, INDEX_NAME, PACKED_BITS, SINGLE_NAME

_FORMATS = {dtype: name for name, dtype in DTYPES.items() if name not in PACKED_BITS}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is to be written.

    Attributes:
        stored_format: format of a tensor whose bytes are copied; None = that of `dtype`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    stored_format: str | None = None

    @property
    def nbytes(self) -> int:
        bits = PACKED_BITS.get(self.stored_format or "", 8 * self.dtype.itemsize)
        return math.prod(self.shape) * bits // 8


def parse_size(size: int | str) -> int:
    """Return bytes for `5_000_000` or for Hugging Face's spelling (`"5GB"`, `"1GiB"`)."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(size))
    try:
        number = float(match[1]) * _UNITS[match[2].upper()] if match else 0
    except (ValueError, KeyError):
        number = 0
    if number < 1:
        raise ConfigError(
            f"max_shard_size is {size!r}; pass bytes, or a number with one of "
            f"{', '.join(u for u in _UNITS if u)} (such as '5GB')"
        )
    return int(number)


def plan_shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> dict[str, list[str]]:
    """Assign tensors, in order, to files of at most `max_bytes` (a larger tensor gets its own).

    Returns:
        file name -> tensor names; one `model.safetensors`, or `model-00001-of-0000N.safetensors`.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if groups[-1] and filled + spec.nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += spec.nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write_tensors(
    directory: str | Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], np.ndarray],
    *,
    max_shard_size: int | str = "5GB",
) -> list[Path]:
    """Write every tensor of `specs`, asking `read(name)` for one value at a time.

    Returns:
        The weight files, and the index where there is more than one.
    """
    directory = Path(directory)
    shards = plan_shards(specs, parse_size(max_shard_size))
    paths = []
    for file, names in shards.items():
        _write_file(directory / file, {name: specs[name] for name in names}, read)
        paths.append(directory / file)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
            "weight_map": {n: file for file, names in shards.items() for n in sorted(names)},
        }
        path = directory / INDEX_NAME
        _replace(path, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        paths.append(path)
    return paths


def write_order(specs: Mapping[str, TensorSpec], max_shard_size: int | str) -> list[str]:
    """Return the order in which `write_tensors` reads values, which other processes follow
    where reading is collective."""
    shards = plan_shards(specs, parse_size(max_shard_size)).values()
    return [n for names in shards for n in _file_order({name: specs[name] for name in names})]


def _file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The library's order: widest elements first, so that every tensor is aligned to its type."""
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


def _write_file(
    path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], np.ndarray]
) -> None:
    """Write one safetensors file; nothing is left under `path` when a value fails."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # what torch loaders require
    offset = 0
    order = _file_order(specs)
    for name in order:
        spec = specs[name]
        stored_format = spec.stored_format or _FORMATS.get(spec.dtype)
        if stored_format is None:
            raise CheckpointError(f"safetensors cannot hold {name!r} of dtype {spec.dtype}")
        header[name] = {
            "dtype": stored_format,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                stream.write(_as_bytes(name, read(name), specs[name]).data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _as_bytes(name: str, value: np.ndarray, spec: TensorSpec) -> np.ndarray:
    dtype = spec.dtype if spec.stored_format is None else np.dtype(np.uint8)
    if value.dtype != dtype or value.nbytes != spec.nbytes:
        raise CheckpointError(
            f"{name!r} was announced as {spec.nbytes} bytes of {dtype} and came as {value.nbytes} "
            f"bytes of {value.dtype}"
        )
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
