"""Read `model.bin` of CTranslate2: the Whisper models of faster-whisper.

The file is a list of named arrays: name, dimensions, type, size and little-endian bytes, and then
further names of the same arrays. An array of 8 or 16 bits has an array of scales beside it, and its
values are the codes divided by the scales. `_MODULES` relates the arrays to Hugging Face's tensors.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.tensor_files import Computed, Index, TensorEntry, TensorFiles

FILE_NAME = "model.bin"
#: The version of the file, the architecture, and the revision of its names.
_VERSION, _ARCHITECTURE, _REVISION = 6, "WhisperSpec", 3
#: Types in the order of their numbers.
_TYPES = ("F32", "I8", "I16", "I32", "F16", "BF16")
_MAX_ARRAYS, _MAX_AXES = 100_000, 4
#: Settings of the decoder, and their values in each Whisper: norms first, and the exact GELU.
_FIXED = {
    "decoder/pre_norm": 1,
    "decoder/activation": 3,
    "decoder/scale_embeddings": 0,
    "decoder/alibi": 0,
    "decoder/start_from_zero_embedding": 0,
}
_TABLE, _HEAD = "decoder/embeddings/weight", "decoder/projection/weight"
#: Module of CTranslate2 -> modules of Hugging Face, whose rows it joins.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "conv1": ("conv1",),
    "conv2": ("conv2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
    "layer_norm": ("layer_norm",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_LAST = {
    **dict.fromkeys(("weight", "gamma", "encodings"), "weight"),
    **dict.fromkeys(("bias", "beta"), "bias"),
}
_NAME = re.compile(
    r"(?P<stack>encoder|decoder)/(?:layer_(?P<layer>\d{1,4})/)?(?P<module>.+)/(?P<last>\w+)"
)


class CTranslate2Arrays(NamedTuple):
    """The arrays of a file by name, and the other names of some arrays."""

    entries: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]

    def read(self, name: str, first: int = 0, count: int | None = None) -> np.ndarray:
        """Return rows of an array; scalars have no rows."""
        entry = self.entries[self.aliases.get(name, name)]
        values = np.memmap(
            entry.file, entry.dtype, "r", offset=entry.start, shape=entry.shape or (1,)
        )
        return np.asarray(values[first : None if count is None else first + count])


def read_ctranslate2_arrays(file: Path) -> CTranslate2Arrays:
    """Return the location of each array of a file, without reading the values.

    Raises:
        CheckpointError: the file is damaged, or contains another model than a Whisper.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        try:
            return _read_arrays(stream, file, size)
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{file} is cut short or damaged ({error}): download or convert the model again"
            ) from error


def _read_arrays(stream: BinaryIO, file: Path, size: int) -> CTranslate2Arrays:
    (version,) = _read_numbers(stream, "I")
    if version != _VERSION:
        raise CheckpointError(
            f"{file} is no model of CTranslate2 with version {_VERSION} of the format (its first "
            f"number is {version}): convert the model with a current ct2-transformers-converter"
        )
    architecture, (revision, count) = _read_text(stream), _read_numbers(stream, "II")
    if (architecture, revision) != (_ARCHITECTURE, _REVISION):
        raise CheckpointError(
            f"{file} contains the architecture {architecture[:60]!r}, revision {revision}; of "
            f"CTranslate2's files, Whisper models are read ({_ARCHITECTURE}, revision "
            f"{_REVISION}): load the original model instead"
        )
    if count > _MAX_ARRAYS:
        raise CheckpointError(f"{file} lists {count} arrays; at most {_MAX_ARRAYS} are read")
    entries: dict[str, TensorEntry] = {}
    for _ in range(count):
        name, (axes,) = _read_text(stream), _read_numbers(stream, "B")
        shape = _read_numbers(stream, f"{min(axes, _MAX_AXES)}I")
        kind, length = _read_numbers(stream, "BI")
        start = stream.tell()
        form = _TYPES[kind] if kind < len(_TYPES) else None
        entry = TensorEntry(file, form or "U8", shape, start, start + length)
        expected = math.prod(shape) * entry.dtype.itemsize
        if not (axes <= _MAX_AXES and form and 0 < expected == length and entry.stop <= size):
            raise CheckpointError(
                f"{file}: the array {name[:200]!r} with {axes} axes {list(shape)}, type {kind} "
                f"and {length} bytes at {start} does not fit: download or convert the model again"
            )
        if name in entries:
            raise CheckpointError(f"{file} lists the array {name[:200]!r} twice")
        entries[name] = entry
        stream.seek(entry.stop)
    (count,) = _read_numbers(stream, "I")
    if count > _MAX_ARRAYS:
        raise CheckpointError(f"{file} lists {count} aliases; at most {_MAX_ARRAYS} are read")
    aliases = {}
    for _ in range(count):
        alias, name = _read_text(stream), _read_text(stream)
        if name not in entries or alias in entries:
            raise CheckpointError(f"{file}: {alias[:200]!r} is no further name of {name[:200]!r}")
        aliases[alias] = name
    return CTranslate2Arrays(entries, aliases)


def _read_numbers(stream: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))


def _read_text(stream: BinaryIO) -> str:
    (length,) = _read_numbers(stream, "H")
    data = stream.read(length)
    if len(data) != length or not data.endswith(b"\0"):
        raise struct.error("a name without its end")
    return data[:-1].decode()


class CTranslate2Files(TensorFiles):
    """The tensors of Hugging Face's layout in a file of CTranslate2."""

    @classmethod
    def open(cls, directory: str | Path, variant: str | None = None) -> TensorFiles:
        """Open `model.bin`.

        Args:
            directory: the file.
            variant: unused: these files have no variants.

        Raises:
            CheckpointError: the file is damaged, or contains another model.
        """
        file = Path(directory)
        if variant is not None:
            raise CheckpointError(f"{file}: CTranslate2 writes no variant {variant!r} of a model")
        arrays = read_ctranslate2_arrays(file)
        check_fixed_settings(arrays, file)
        entries: dict[str, TensorEntry] = {}
        computed: dict[str, Computed] = {}
        for name, source, first, count in _list_tensors(arrays, file):
            entry = arrays.entries[arrays.aliases.get(source, source)]
            width = math.prod(entry.shape[1:]) * entry.dtype.itemsize
            start = entry.start + first * width
            part = replace(
                entry, shape=(count, *entry.shape[1:]), start=start, stop=start + count * width
            )
            if entry.dtype.kind != "i":
                entries[name] = part
                continue
            scales = _find_scales(arrays, source, file)
            # The values are float32.
            size = math.prod(part.shape) * 4
            computed[name] = Computed(
                replace(part, format="F32", stop=start + size),
                _Dequantizer(arrays, source, scales, first, count),
            )
        return cls(entries).add_tensors(computed) if computed else cls(entries)


class _Dequantizer(NamedTuple):
    """Reads rows of an array of codes as float32."""

    arrays: CTranslate2Arrays
    name: str
    scales: str
    first: int
    rows: int

    def __call__(self, index: Index) -> np.ndarray:
        codes = self.arrays.read(self.name, self.first, self.rows).astype(np.float32)
        scales = self.arrays.read(self.scales).astype(np.float32)
        if len(scales) > 1:
            scales = scales[self.first : self.first + self.rows]
        return (codes / scales.reshape(-1, *[1] * (codes.ndim - 1)))[index]


def _find_scales(arrays: CTranslate2Arrays, source: str, file: Path) -> str:
    """Return the name of the scales of an array of codes: one, or one for each row."""
    name = f"{source}_scale"
    scales = arrays.entries.get(arrays.aliases.get(name, name))
    rows = arrays.entries[arrays.aliases.get(source, source)].shape[0]
    if scales is None or scales.dtype.kind == "i" or scales.shape not in ((), (1,), (rows,)):
        raise CheckpointError(
            f"{file}: the codes {source} need {name} with one scale or {rows}: convert the model "
            "again"
        )
    values = arrays.read(name).astype(np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"{file}: {name} has scales that are no positive numbers: download or convert the "
            "model again"
        )
    return name


def check_fixed_settings(arrays: CTranslate2Arrays, file: Path) -> None:
    """Check the settings that each Whisper has.

    Raises:
        CheckpointError: a setting has another value.
    """
    for name, expected in _FIXED.items():
        if name not in arrays.entries:
            continue
        entry = arrays.entries[name]
        value = None if entry.shape else arrays.read(name)[0]
        if value != expected:
            raise CheckpointError(
                f"{file} has {name}={value}, and a Whisper has {expected}: load the original model"
            )


def _list_tensors(arrays: CTranslate2Arrays, file: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield name of a tensor, name of its array, first row and number of rows."""
    aliases = arrays.aliases
    head = aliases.get(_HEAD, _HEAD)
    if head in arrays.entries and head != aliases.get(_TABLE, _TABLE):
        raise CheckpointError(
            f"{file} has a head ({_HEAD}) that differs from its embeddings, which no Whisper of "
            "Hugging Face's layout has: load the original model"
        )
    names = {*arrays.entries, *aliases}
    for source in (*arrays.entries, *aliases):
        entry = arrays.entries[aliases.get(source, source)]
        is_scale = source.endswith("_scale") and source.removesuffix("_scale") in names
        if source.startswith(_HEAD) or not entry.shape or is_scale:
            continue
        match = _NAME.fullmatch(source)
        targets = _MODULES.get(match["module"]) if match else None
        last = _LAST.get(match["last"]) if match else None
        if match is None or targets is None or last is None:
            raise CheckpointError(
                f"{file} has the array {source[:200]!r}, which no Whisper has: load the original "
                "model"
            )
        rows, rest = divmod(entry.shape[0], len(targets))
        if rest:
            raise CheckpointError(
                f"{file}: {source} has {entry.shape[0]} rows, which are no {len(targets)} equal "
                "parts: convert the model again"
            )
        layer = f"layers.{match['layer']}." if match["layer"] else ""
        for number, target in enumerate(targets):
            if last == "bias" and target.endswith("k_proj"):
                _check_key_bias(arrays, source, number * rows, rows, file)
                continue
            yield f"model.{match['stack']}.{layer}{target}.{last}", source, number * rows, rows


def _check_key_bias(
    arrays: CTranslate2Arrays, source: str, first: int, count: int, file: Path
) -> None:
    """Check that a bias of keys is zero: Whisper's keys have none."""
    if np.any(arrays.read(source, first, count)):
        raise CheckpointError(
            f"{file}: {source} has a bias of keys, which no Whisper has: load the original model"
        )
