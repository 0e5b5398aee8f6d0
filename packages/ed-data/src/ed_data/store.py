"""Tokens on disk: one flat file of integers, the offsets of the documents, memory-mapped.

A store is a folder of `meta.json` and plain arrays: `tokens.bin` (uint16 or uint32), `offsets.bin`
(int64), `hashes.bin` (uint64), and `loss_mask.bin` (uint8) where there is one. It is filled under
another name and renamed when complete, so a reader never sees half of one, and of two processes
that fill the same store one wins.

The arrays have no header: `numpy.load` parses one with `ast.literal_eval`, which fails now and then
in the threads of Python 3.11 ("AST constructor recursion depth mismatch").
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError

#: Raised when the layout, or the meaning of the files, changes: old caches are then not read.
VERSION = 1
_DAY = 86_400.0


class Tokens(Protocol):
    """Documents as tokens, by number."""

    hashes: NDArray[np.uint64]
    has_loss_mask: bool

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each document."""
        ...

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """Return the tokens of pieces of documents, joined, and their loss mask if there is one."""
        ...

    @property
    def digest(self) -> str:
        """A hash of the contents: equal where every batch would be."""
        ...


class TokenStore:
    """A finished store, opened read-only.

    Raises:
        DataError: the folder is not a complete store of this version.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / "meta.json").read_text())
            self.hashes = np.fromfile(self.folder / "hashes.bin", np.uint64)
            self._offsets = _map(self.folder / "offsets.bin", np.dtype(np.int64))
            self._tokens = _map(self.folder / "tokens.bin", np.dtype(meta["dtype"]))
            mask = self.folder / "loss_mask.bin"
            self._mask = _map(mask, np.dtype(np.uint8)) if meta["loss_mask"] else None
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.folder}: not a complete token store: {error}") from error
        whole = len(self._offsets) == len(self.hashes) + 1
        if not whole or meta.get("version") != VERSION or len(self._tokens) != self._offsets[-1]:
            raise DataError(f"{self.folder}: a token store of another version, or cut short")
        self.meta: dict[str, Any] = meta
        self.has_loss_mask = self._mask is not None

    @property
    def digest(self) -> str:
        """Hash of the documents and the encoder that the store was made from."""
        return str(self.meta["digest"])

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Tokens.lengths`."""
        return self._offsets[documents + 1] - self._offsets[documents]

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `Tokens.gather`."""
        first = self._offsets[documents] + starts
        # Position j of piece i is at first[i] + j.
        index = np.arange(int(counts.sum())) + np.repeat(first - _before(counts), counts)
        tokens = self._tokens[index].astype(np.int32)
        return tokens, None if self._mask is None else self._mask[index].astype(bool)


def write_store(
    folder: str | os.PathLike[str],
    batches: Iterable[tuple[list[NDArray[Any]], list[NDArray[Any]] | None, list[int]]],
    *,
    vocab_size: int,
    encoder: str,
    about: dict[str, Any],
) -> TokenStore:
    """Write a store and open it; where another process was faster, open its store.

    Args:
        folder: where the store will be.
        batches: per batch the token arrays of documents, their loss masks or None, their hashes.
        vocab_size: ids are below it; up to 65536 they take two bytes.
        encoder: fingerprint of the encoder.
        about: free JSON values for a person who looks into the folder.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")
    _remove_abandoned(folder)
    part.mkdir()
    try:
        _fill(part, batches, vocab_size, encoder, about)
        try:
            part.rename(folder)
        except OSError:
            try:
                return TokenStore(folder)  # another process was faster
            except DataError:
                shutil.rmtree(folder)  # a store that is broken, or of an older version
                part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return TokenStore(folder)


def _fill(
    folder: Path,
    batches: Iterable[tuple[list[NDArray[Any]], list[NDArray[Any]] | None, list[int]]],
    vocab_size: int,
    encoder: str,
    about: dict[str, Any],
) -> None:
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    lengths: list[NDArray[np.int64]] = []
    hashes: list[int] = []
    masked = False
    with open(folder / "tokens.bin", "wb") as ids, open(folder / "loss_mask.bin", "wb") as masks:
        for arrays, mask_arrays, batch_hashes in batches:
            if not arrays:
                continue
            _append(ids, np.concatenate(arrays).astype(dtype))
            if mask_arrays is not None:
                masked = True
                _append(masks, np.concatenate(mask_arrays).astype(np.uint8))
            lengths.append(np.fromiter(map(len, arrays), np.int64, len(arrays)))
            hashes.extend(batch_hashes)
    if not masked:
        (folder / "loss_mask.bin").unlink()
    counts = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    offsets.tofile(folder / "offsets.bin")
    content = np.array(hashes, np.uint64)
    content.tofile(folder / "hashes.bin")
    meta = {
        "version": VERSION,
        "dtype": dtype.name,
        "loss_mask": masked,
        "documents": len(counts),
        "tokens": int(offsets[-1]),
        "digest": digest_of(content, encoder),
        **about,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, default=str))


def _remove_abandoned(folder: Path) -> None:
    """Delete what a killed process left of this store; a day is longer than a pause in writing."""
    for part in folder.parent.glob(f".{folder.name}.*.part"):
        with contextlib.suppress(OSError):  # another process may be deleting it too
            newest = max(path.stat().st_mtime for path in (part, *part.iterdir()))
            if time.time() - newest > _DAY:
                shutil.rmtree(part)


def digest_of(hashes: NDArray[np.uint64], encoder: str) -> str:
    """Hash the documents, in order, with what encodes them: equal where the tokens are."""
    return hashlib.blake2b(hashes.tobytes() + encoder.encode(), digest_size=16).hexdigest()


def _append(stream: IO[bytes], values: NDArray[Any]) -> None:
    stream.write(values.tobytes())


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of the counts before each one."""
    return np.cumsum(counts) - counts
