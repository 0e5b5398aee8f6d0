"""Facts about a checkpoint on disk, without loading the model."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ed_infra.errors import CheckpointError
from pydantic import BaseModel, Field, StrictInt, TypeAdapter

#: Maximum length of a header of a safetensors file, in bytes; see the format's documentation.
MAX_HEADER = 100_000_000
#: Limit of numbers of a configuration, and of the elements of a tensor.
MAX_NUMBER = 2**48
UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


@dataclass(frozen=True)
class CheckpointFiles:
    """A directory with `config.json` and safetensors files."""

    path: Path

    @staticmethod
    def is_checkpoint(path: Path) -> bool:
        """Return whether a directory contains a model."""
        return read_signature(path) is not None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`; empty if the file is damaged."""
        return _json(self.path / "config.json")

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files with weights, by name."""
        return sorted(_weight_files(self.path))

    @property
    def size(self) -> int:
        """Bytes of the files with weights."""
        return sum(file.stat().st_size for file in self.weight_files)

    @property
    def modified(self) -> float:
        """Time of the last change of a file, in seconds since 1970."""
        files = [self.path / "config.json", *self.weight_files]
        return max(file.stat().st_mtime for file in files)

    @cached_property
    def tensors(self) -> TensorFacts:
        """The contents of the headers. The headers, which can be long, are not stored.

        Raises:
            CheckpointError: a file is no safetensors file.
        """
        headers = [[file.name, file.stat().st_size, _header(file)] for file in self.weight_files]
        content = json.dumps([self.config, headers], sort_keys=True)
        parameters, sizes = 0, Counter[str]()
        for *_, header in headers:
            for tensor in header.values():
                first, end = tensor["data_offsets"]
                sizes[tensor["dtype"]] += end - first
                parameters += math.prod(tensor["shape"])
        dtype = max(sizes, key=lambda name: sizes[name], default="F32")
        return TensorFacts(hashlib.sha256(content.encode()).hexdigest(), parameters, dtype)

    @property
    def digest(self) -> str:
        """SHA-256 of `config.json`, and of the name, size and header of each file with weights.

        Equal digests do not prove equal weights, because reading all weights would need long.
        """
        return self.tensors.digest

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return self.tensors.parameters

    @property
    def dtype(self) -> str:
        """The dtype with the most bytes, in the spelling of safetensors: `BF16`."""
        return self.tensors.dtype

    @property
    def quantization(self) -> str:
        """The quantization method of the checkpoint, or the dtype of its weights."""
        method = self.config.get("quantization_config")
        name = method.get("quant_method") if isinstance(method, dict) else None
        return name if isinstance(name, str) else self.dtype

    @property
    def family(self) -> str:
        """The model type of `config.json`."""
        return str(self.config.get("model_type", "unknown"))[:64]

    @property
    def chat_template(self) -> str:
        """The chat template of the tokenizer; empty without a template."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        template = _json(self.path / "tokenizer_config.json").get("chat_template")
        return template if isinstance(template, str) else ""

    def check(self) -> None:
        """Read every file that lists of models need.

        Raises:
            CheckpointError: a file is damaged, or was deleted.
        """
        try:
            _ = self.size, self.modified
            problem = self._problem
        except OSError as error:
            problem = type(error).__name__
        if problem:
            raise CheckpointError(
                f"{self.path.name} has a file that is damaged or cannot be read ({problem}): "
                "copy the files again, or remove the folder"
            )

    @cached_property
    def _problem(self) -> str:
        """The kind of the error of a damaged file, whose content is read once; empty without."""
        try:
            _ = self.tensors, self.chat_template
        except ValueError as error:
            return type(error).__name__
        return ""

    def read_size(self, *names: str) -> int | None:
        """Return the first known field of the language model's configuration."""
        text = self.config.get("text_config")
        for fields in (self.config, text if isinstance(text, dict) else {}):
            for name in names:
                value = fields.get(name)
                if type(value) is int and 0 < value < MAX_NUMBER:
                    return value
        return None

    def page_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Return the bytes of cached keys and values of this many tokens, for full attention.

        Layers with windows or recurrent states need less.
        """
        layers = self.read_size("num_hidden_layers", "n_layer") or 0
        heads = self.read_size("num_attention_heads", "n_head") or 1
        width = self.read_size("head_dim")
        if width is None:
            width = (self.read_size("hidden_size", "n_embd") or 0) // heads
        cached = self.read_size("num_key_value_heads") or heads
        return 2 * layers * cached * width * tokens * bytes_per_value


class TensorFacts(NamedTuple):
    """Digest, number of elements and most frequent dtype of the tensors of a checkpoint."""

    digest: str
    parameters: int
    dtype: str


#: Name, time, size and number of each file that the facts about a checkpoint depend on.
Signature = tuple[tuple[str, int, int, int], ...]
_SMALL_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")


def read_signature(path: Path) -> Signature | None:
    """Return the signature of a folder; None if it contains no model, or cannot be read."""
    files: list[tuple[str, int, int, int]] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                named = entry.name in _SMALL_FILES or entry.name.endswith(".safetensors")
                if named and entry.is_file():
                    status = entry.stat()
                    facts = (status.st_mtime_ns, status.st_size, status.st_ino)
                    files.append((entry.name, *facts))
    except (OSError, ValueError):
        return None
    names = {name for name, *_ in files}
    complete = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    return tuple(sorted(files)) if complete else None


class CheckpointCache:
    """The files of checkpoints. A folder is read again after one of its files has changed.

    Args:
        most: maximum number of folders; the oldest is removed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[Path, tuple[Signature, CheckpointFiles]] = OrderedDict()

    def get(self, path: Path) -> CheckpointFiles | None:
        """Return the files of a folder; None if it contains no model."""
        signature = read_signature(path)
        with self._lock:
            entry = self._entries.pop(path, None)
            if signature is None:
                return None
            if entry is None or entry[0] != signature:
                entry = signature, CheckpointFiles(path)
            self._entries[path] = entry
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
            return entry[1]


def size_name(count: int) -> str:
    """Return a number of parameters in Ollama's form: `1.2B`."""
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + unit
    return str(count)


def _json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files with weights. A pipe or a device would block the reader."""
    return (file for file in folder.glob("*.safetensors") if file.is_file())


class _Tensor(BaseModel):
    """The entry of a tensor in a header."""

    dtype: Annotated[str, Field(max_length=16)]
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=MAX_NUMBER)]], Field(max_length=16)]
    data_offsets: tuple[Annotated[StrictInt, Field(ge=0)], Annotated[StrictInt, Field(ge=0)]]


_HEADER = TypeAdapter(dict[str, _Tensor])


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size - 8
        if length > min(MAX_HEADER, size):
            raise CheckpointError(f"{file} is no safetensors file: its header has {length} bytes")
        text = opened.read(length)
    try:
        header = json.loads(text)
        if isinstance(header, dict):
            header.pop("__metadata__", None)
        tensors = _HEADER.validate_python(header)
    except (ValueError, RecursionError) as error:
        reason = type(error).__name__
        raise CheckpointError(f"{file} is no safetensors file ({reason} in its header)") from None
    for tensor in tensors.values():
        first, end = tensor.data_offsets
        if not first <= end <= size - length or math.prod(tensor.shape) >= MAX_NUMBER:
            raise CheckpointError(f"{file} is no safetensors file: a tensor is outside of the file")
    return header
