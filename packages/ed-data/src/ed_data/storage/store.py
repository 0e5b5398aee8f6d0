"""The tokens of documents: memory-mapped from disk, or made when they are first asked for.

A store on disk is a folder of `meta.json` and plain arrays: `tokens.bin` (uint16 or uint32), all
sequences joined, document after document and column after column; `offsets.bin` (int64), where each
sequence begins; `hashes.bin` (uint64); and `loss_mask.bin` (uint8) and `values.bin` (float32) where
there are such. It is filled under another name and renamed when complete, so a reader never sees
half of one, and of two processes that fill the same store one wins.

The arrays have no header: `numpy.load` parses one with `ast.literal_eval`, which fails now and then
in the threads of Python 3.11 ("AST constructor recursion depth mismatch").
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.cache import new_folder, remove_abandoned
from ed_data.errors import DataError
from ed_data.rows.documents import Tally
from ed_data.tokens.encoder import Encoded

#: Raised when the layout, or the meaning of the files, changes: old caches are then not read.
VERSION = 1

IntArray = NDArray[np.int64]


class Tokens(Protocol):
    """The tokens of documents, by number.

    Attributes:
        hashes: `Example.content_digest` of each document.
        columns: sequences of each document.
        tally: what became of the rows that the documents were read from.
        complete: whether every length is known, or can be soon; False while a store is written.
    """

    hashes: NDArray[np.uint64]
    columns: int

    @property
    def tally(self) -> Tally: ...

    @property
    def complete(self) -> bool: ...

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """Return the number of tokens in a column of each document; None: in the longest one."""
        ...

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """Return the tokens of pieces of documents, joined, and their loss mask if there is one."""
        ...

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """Return the values [tokens, values] of pieces of documents, joined."""
        ...

    @property
    def digest(self) -> str:
        """A hash of the contents: equal where every batch would be."""
        ...


@dataclass(frozen=True)
class Part:
    """The documents of one inform that belong to a split.

    Attributes:
        label: the inform's name.
        tokens: all documents of the inform.
        members: numbers of those of the split, ascending.
    """

    label: str
    tokens: Tokens
    members: IntArray


class TokenStore:
    """A finished store, opened read-only.

    Raises:
        DataError: the folder is not a complete store of this version.
    """

    complete = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / "meta.json").read_text())
            self.hashes = np.fromfile(self.folder / "hashes.bin", np.uint64)
            self._offsets = _map(self.folder / "offsets.bin", np.dtype(np.int64))
            self._tokens = _map(self.folder / "tokens.bin", np.dtype(meta["dtype"]))
            mask = self.folder / "loss_mask.bin"
            self._mask = _map(mask, np.dtype(np.uint8)) if meta["loss_mask"] else None
            width = int(meta.get("values", 0))
            values = self.folder / "values.bin"
            self._values = np.empty((0, 0), np.float32)
            if width:
                self._values = _map(values, np.dtype(np.float32)).reshape(-1, width)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.folder}: not a complete token store: {error}") from error
        self.columns = int(meta.get("columns", 1))
        whole = len(self._offsets) == len(self.hashes) * self.columns + 1
        if not whole or meta.get("version") != VERSION or len(self._tokens) != self._offsets[-1]:
            raise DataError(f"{self.folder}: a token store of another version, or cut short")
        self.meta: dict[str, object] = meta
        self.tally = Tally.of_json(meta.get("tally") or {})

    @property
    def digest(self) -> str:
        """Hash of the documents and the encoder that the store was made from."""
        return str(self.meta["digest"])

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """See `Tokens.lengths`."""
        if column is None and self.columns > 1:
            return np.max([self.lengths(documents, c) for c in range(self.columns)], axis=0)
        at = documents * self.columns + (column or 0)
        return self._offsets[at + 1] - self._offsets[at]

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `Tokens.gather`."""
        first = self._offsets[documents * self.columns + column] + starts
        index = joined(first, counts)
        tokens = self._tokens[index].astype(np.int32)
        return tokens, None if self._mask is None else self._mask[index].astype(bool)

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """See `Tokens.values`."""
        first = self._offsets[documents * self.columns + column] + starts
        return self._values[joined(first, counts)]


def joined(first: IntArray, counts: IntArray) -> IntArray:
    """Return `first[i], first[i] + 1, …` (`counts[i]` of them) of each piece i, joined."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(first - before, counts)


def write_store(
    folder: str | os.PathLike[str],
    batches: Iterable[Encoded],
    *,
    vocab_size: int,
    encoder: str,
    about: dict[str, object],
    columns: int = 1,
    tally: Tally | None = None,
) -> TokenStore:
    """Write a store and open it; where another process was faster, open its store.

    Args:
        folder: where the store will be.
        batches: the documents.
        vocab_size: ids are below it; up to 65536 they take two bytes.
        encoder: fingerprint of the encoder.
        about: free JSON values for a person who looks into the folder.
        columns: sequences of each document.
        tally: what became of the rows, complete when the batches are.

    Raises:
        DataError: the folder cannot be written, or no token of any document has loss.
    """
    folder = Path(folder)
    remove_abandoned(folder.parent)
    with new_folder(folder) as part:
        about = {"columns": columns, **about}
        _fill(part, batches, vocab_size, encoder, about, tally or Tally())
        try:
            part.rename(folder)
        except OSError:
            try:
                return TokenStore(folder)  # another process was faster
            except DataError:
                shutil.rmtree(folder)  # a store that is broken, or of an older version
                part.rename(folder)
    return TokenStore(folder)


_NONE = np.empty(0, np.uint64)


def _fill(
    folder: Path,
    batches: Iterable[Encoded],
    vocab_size: int,
    encoder: str,
    about: dict[str, object],
    tally: Tally,
) -> None:
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    lengths, digests, contents = [np.empty(0, np.int64)], [_NONE], [_NONE]
    masked, width = False, 0
    with (
        open(folder / "tokens.bin", "wb") as ids,
        open(folder / "loss_mask.bin", "wb") as masks,
        open(folder / "values.bin", "wb") as numbers,
    ):
        for batch in batches:
            if not batch.tokens:
                continue
            ids.write(np.concatenate(batch.tokens).astype(dtype).tobytes())
            if batch.masks is not None:
                masked = True
                masks.write(np.concatenate(batch.masks).astype(np.uint8).tobytes())
            if batch.values is not None:
                values = np.concatenate(batch.values)
                width = values.shape[1]
                numbers.write(values.astype(np.float32).tobytes())
            lengths.append(np.fromiter(map(len, batch.tokens), np.int64, len(batch.tokens)))
            digests.append(np.array(batch.digests, np.uint64))
            own = batch.contents is not None
            contents.append(np.array(batch.contents, np.uint64) if own else digests[-1])
    if not masked:
        (folder / "loss_mask.bin").unlink()
    if not width:
        (folder / "values.bin").unlink()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    offsets.tofile(folder / "offsets.bin")
    np.concatenate(contents).tofile(folder / "hashes.bin")
    documents = np.concatenate(digests)
    meta = {
        "version": VERSION,
        "dtype": dtype.name,
        "loss_mask": masked,
        "values": width,
        "documents": len(documents),
        "tokens": int(offsets[-1]),
        "digest": digest_of(documents, encoder),
        "tally": tally.as_json(),
        **about,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, default=str))


def digest_of(hashes: NDArray[np.uint64], encoder: str) -> str:
    """Hash the documents, in order, and their encoder: equal where the tokens are."""
    return hashlib.blake2b(hashes.tobytes() + encoder.encode(), digest_size=16).hexdigest()


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
