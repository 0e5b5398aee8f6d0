"""Serialization of messages between the processes of a model: msgpack and raw arrays.

Only the classes of `CLASSES` can be deserialized, so that a message cannot create other objects or
run code. A message consists of the length of its head (8 bytes), the head in msgpack, and the bytes
of the arrays, to which the head refers.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import jax
import msgpack
import numpy as np
from ed_infra.errors import EasyDeLError
from ed_infra.options import Options
from ed_infra.specs import LoraSpec
from ed_models.adapters.values import LayerAdapter
from ed_models.checkpoints.embedding_settings import EmbeddingSettings

from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import Command, EncoderInput, TokenRules
from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.outputs import (
    CompletionOutput,
    LabelSet,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from ed_esurge.runner.result import NotFinite
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Classes of messages, by name.
CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *get_args(Command),
        EncoderInput,
        SamplingParams,
        PoolingParams,
        StructuredOutputs,
        LayerAdapter,
        TokenRules,
        LoraSpec,
        CheckedPrompt,
        RequestOutput,
        CompletionOutput,
        RequestMetrics,
        Logprob,
        LabelSet,
        EmbeddingSettings,
        LoadedAdapter,
    )
}
# Codes of msgpack's extensions.
TUPLE, FROZENSET, OBJECT, ARRAY, ERROR = range(5)
#: Maximum nesting of extensions. Deeper messages would overflow the stack of the interpreter.
_MAX_DEPTH = 32
#: Kinds of the types of arrays: booleans, numbers, and those of ml_dtypes.
_ARRAY_KINDS = "biufcV"
#: Bytes of a head from which the collection of garbage waits, which would visit each new list.
_LONG_HEAD = 2**16


class WireError(EasyDeLError):
    """A message is not in the format of this engine."""


class _Writer:
    """Collects the arrays of one message."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.size = 0

    def pack(self, value: object) -> bytes:
        """Return the msgpack encoding of a value."""
        packed = msgpack.packb(value, default=self._extension, strict_types=True)
        assert packed is not None, "msgpack returns None for streams only"
        return packed

    def _extension(self, value: Any) -> msgpack.ExtType:
        kind = type(value)
        if kind is tuple:
            return msgpack.ExtType(TUPLE, self.pack(list(value)))
        if kind is frozenset:
            return msgpack.ExtType(FROZENSET, self.pack(sorted(value)))
        if isinstance(value, np.ndarray | jax.Array):
            return msgpack.ExtType(ARRAY, self.pack(self._array(np.asarray(value))))
        if isinstance(value, BaseException):
            return msgpack.ExtType(ERROR, self.pack(_encode_error(value)))
        if CLASSES.get(kind.__name__) is not kind:
            raise TypeError(f"a {kind.__name__} cannot be sent to other processes")
        return msgpack.ExtType(OBJECT, self.pack([kind.__name__, _fields(value)]))

    def _array(self, array: np.ndarray) -> list[Any]:
        if array.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be sent to other processes")
        array = np.ascontiguousarray(array).reshape(array.shape)
        start, self.size = self.size, self.size + array.nbytes
        self.arrays.append(array)
        return [array.dtype.name, list(array.shape), start]


def _fields(value: Options | DataclassInstance) -> dict[str, Any]:
    if isinstance(value, Options):  # the set of explicit fields is part of the value
        return {name: getattr(value, name) for name in sorted(value.model_fields_set)}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _encode_error(error: BaseException) -> list[Any]:
    """Return whether an error is `NotFinite`, and its message for users."""
    return [
        isinstance(error, NotFinite),
        str(error) if isinstance(error, EasyDeLError) else repr(error),
    ]


def encode_message(value: object) -> bytes:
    """Return the bytes of a value.

    Args:
        value: plain values, lists, tuples, dicts with keys of one plain type, fully addressable
            arrays, errors, and objects of `CLASSES`.

    Raises:
        TypeError: the value contains an object of another type.
        RuntimeError: an array has shards on devices of other processes.
    """
    writer = _Writer()
    head = writer.pack(value)
    parts = [array.reshape(-1).view(np.uint8).data for array in writer.arrays]
    return b"".join([len(head).to_bytes(8, "big"), head, *parts])


@functools.cache
def classes_digest() -> str:
    """Return a digest of the names and fields of `CLASSES`."""
    fields = {
        name: sorted(getattr(kind, "model_fields", None) or kind.__dataclass_fields__)
        for name, kind in CLASSES.items()
    }
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def decode_message(data: bytes, max_head: int | None = None) -> Any:
    """Return the value of encoded bytes. An error becomes an `EasyDeLError` with the same text.

    Args:
        data: the bytes of `encode_message`.
        max_head: maximum bytes of the message without its arrays; None = no limit. The time of an
            untrusted message depends on these bytes.

    Raises:
        WireError: the bytes are not a valid encoding, or exceed the limit.
    """
    size = int.from_bytes(data[:8], "big")
    arrays = memoryview(data)[8 + size :]
    depth = 0

    def unpack(packed: bytes | memoryview) -> Any:
        return msgpack.unpackb(packed, ext_hook=extension, strict_map_key=False)

    def extension(code: int, packed: bytes) -> Any:
        nonlocal depth
        if depth == _MAX_DEPTH:
            raise ValueError(f"extensions are nested more than {_MAX_DEPTH} times")
        depth += 1
        content = unpack(packed)
        depth -= 1
        match code:
            case _ if code == TUPLE:
                return tuple(content)
            case _ if code == FROZENSET:
                return frozenset(content)
            case _ if code == ARRAY:
                return _read_array(arrays, *content)
            case _ if code == ERROR:
                not_finite, text = content
                return NotFinite() if not_finite else EasyDeLError(text)
            case _ if code == OBJECT:
                name, fields = content
                return CLASSES[name](**fields)
        raise ValueError(f"there is no extension {code}")

    try:
        if 8 + size > len(data):
            raise ValueError(f"{len(data)} bytes cannot have a head of {size}")
        if max_head is not None and size > max_head:
            raise ValueError(f"a head of {size} bytes exceeds the limit of {max_head}")
        with _paused_collection(size):
            return unpack(memoryview(data)[8 : 8 + size])
    except Exception as error:  # msgpack, numpy and constructors raise different classes
        raise WireError(f"a message of another process cannot be read: {error}") from error


@contextmanager
def _paused_collection(size: int) -> Iterator[None]:
    """Pause the collection of garbage while a long head is read."""
    if size < _LONG_HEAD or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_array(arrays: memoryview, dtype: str, shape: list[int], start: int) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind not in _ARRAY_KINDS or kind.fields or min(shape, default=0) < 0 or start < 0:
        raise ValueError(f"no array has type {dtype}, shape {shape} and start {start}")
    flat = np.frombuffer(arrays, np.uint8, math.prod(shape) * kind.itemsize, start)
    return flat.view(kind).reshape(shape)
