"""The tokens of documents: the protocol, and stores on disk that are memory-mapped.

A store is a folder with `meta.json` and plain arrays: `tokens.bin` (uint16 or uint32) concatenates
all sequences, document after document and column after column; `offsets.bin` (int64) contains the
first token of each sequence; `hashes.bin` (uint64) the content hashes; `loss_mask.bin` (uint8),
`values.bin` (float32) and `digests.bin` (uint64, hashes of all fields) exist if documents have
them. A store is written under a temporary name and renamed when complete, so readers never see an
incomplete store. If two processes write the same store, the first one wins.

The arrays have no header, because `numpy.load` parses headers with `ast.literal_eval`, which fails
sporadically in threads of Python 3.11 ("AST constructor recursion depth mismatch").
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.cache import new_folder, remove_abandoned
from ed_data.errors import DataError
from ed_data.rows.documents import Tally
from ed_data.rows.example import RowMedium
from ed_data.tokens.encoded import EncodedDocuments, IntArray

#: Increased when the layout or the meaning of the files changes; older caches are then ignored.
STORE_VERSION = 1
#: Hashes of documents (uint64), in stores of several fields.
_DIGESTS = "digests.bin"


class StoredTokens(Protocol):
    """The tokens of documents, by document number.

    Attributes:
        hashes: `Example.content_digest` of each document.
        digests: `Example.digest` of each document; None if they are not stored.
        columns: number of token sequences of each document.
        tally: statistics of the rows that the documents were read from.
        complete: whether every length is known or cheap to compute; False while a store is written.
    """

    hashes: NDArray[np.uint64]
    columns: int

    @property
    def digests(self) -> NDArray[np.uint64] | None: ...

    @property
    def tally(self) -> Tally: ...

    @property
    def complete(self) -> bool: ...

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """Return the number of tokens of each document in a column; None: the longest column."""
        ...

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """Return the concatenated tokens of pieces of documents, and their loss mask if any."""
        ...

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """Return the concatenated values [tokens, values] of pieces of documents."""
        ...

    def media_counts(self, documents: IntArray) -> IntArray:
        """Return the number of images and recordings of each document."""
        ...

    def media(self, document: int) -> Sequence[RowMedium]:
        """Return the images of a document, in the order of their tokens, or its recording."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the contents; equal hashes mean equal batches."""
        ...


@dataclass(frozen=True)
class StorePart:
    """The documents of one inform that belong to a split.

    Attributes:
        label: name of the inform.
        tokens: all documents of the inform.
        members: numbers of the documents of the split, ascending.
        excluded: [documents] True for those whose places in rows stay empty; None: there are none.
        digests: `StoredTokens.digests`, if they were read with the excluded documents.
    """

    label: str
    tokens: StoredTokens
    members: IntArray
    excluded: NDArray[np.bool_] | None = None
    digests: NDArray[np.uint64] | None = None


class TokenArrays:
    """Token sequences in flat arrays, document after document and column after column.

    Args:
        offsets: [sequences + 1] first token of each sequence.
        tokens: [tokens].
        mask: [tokens] 1 for tokens with loss, or None if every token has loss.
        values: [tokens, values], or an empty array.
        columns: number of sequences of each document.
        media: images or recording of each document; empty if no document has any.
    """

    complete = True

    def __init__(
        self,
        offsets: IntArray,
        tokens: NDArray[np.integer],
        mask: NDArray[np.uint8] | None,
        values: NDArray[np.float32],
        columns: int,
        media: Sequence[Sequence[RowMedium]] = (),
    ) -> None:
        self._offsets, self._tokens, self._mask, self._values = offsets, tokens, mask, values
        self.columns, self._media = columns, media
        self.hashes = np.empty(0, np.uint64)
        self.tally = Tally()

    @property
    def digests(self) -> NDArray[np.uint64] | None:
        """See `StoredTokens.digests`."""
        return None

    @property
    def digest(self) -> str:
        """Hash of the contents; see `StoredTokens.digest`."""
        return compute_digest(self.hashes, "stream")

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """See `StoredTokens.lengths`."""
        if column is None and self.columns > 1:
            return np.max([self.lengths(documents, c) for c in range(self.columns)], axis=0)
        at = documents * self.columns + (column or 0)
        return self._offsets[at + 1] - self._offsets[at]

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `StoredTokens.gather`."""
        index = self._index(documents, starts, counts, column)
        tokens = self._tokens[index].astype(np.int32)
        return tokens, None if self._mask is None else self._mask[index].astype(bool)

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """See `StoredTokens.values`."""
        return self._values[self._index(documents, starts, counts, column)]

    def media_counts(self, documents: IntArray) -> IntArray:
        """See `StoredTokens.media_counts`."""
        return np.array([len(self.media(document)) for document in documents.tolist()], np.int64)

    def media(self, document: int) -> Sequence[RowMedium]:
        """See `StoredTokens.media`."""
        return self._media[document] if self._media else ()

    def _index(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int
    ) -> IntArray:
        return concat_ranges(self._offsets[documents * self.columns + column] + starts, counts)


class TokenStore(TokenArrays):
    """A complete store on disk, memory-mapped.

    Raises:
        DataError: the folder is not a complete store of this version.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / "meta.json").read_text())
            hashes = np.fromfile(self.folder / "hashes.bin", np.uint64)
            mask = self.folder / "loss_mask.bin"
            width = int(meta.get("values", 0))
            values = np.empty((0, 0), np.float32)
            if width:
                values = _map(self.folder / "values.bin", np.dtype(np.float32)).reshape(-1, width)
            super().__init__(
                _map(self.folder / "offsets.bin", np.dtype(np.int64)),
                _map(self.folder / "tokens.bin", np.dtype(meta["dtype"])),
                _map(mask, np.dtype(np.uint8)) if meta["loss_mask"] else None,
                values,
                int(meta.get("columns", 1)),
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.folder} is not a complete token store: {error}") from error
        is_complete = len(self._offsets) == len(hashes) * self.columns + 1
        if (
            not is_complete
            or meta.get("version") != STORE_VERSION
            or len(self._tokens) != self._offsets[-1]
        ):
            raise DataError(f"{self.folder} is truncated, or a token store of another version")
        self.hashes = hashes
        self.meta: dict[str, object] = meta
        self.tally = Tally.from_json(meta.get("tally") or {})

    @property
    def digests(self) -> NDArray[np.uint64] | None:
        """Hashes of the documents; stores of earlier versions have only those of one field."""
        about = self.meta.get("key")
        encoder = about.get("encoder") if isinstance(about, dict) else None
        if compute_digest(self.hashes, str(encoder)) == self.digest:
            return self.hashes
        path = self.folder / _DIGESTS
        return np.fromfile(path, np.uint64) if path.exists() else None

    @property
    def digest(self) -> str:
        """Hash of the documents and the encoder that the store was created from."""
        return str(self.meta["digest"])


def concat_ranges(first: IntArray, counts: IntArray) -> IntArray:
    """Return the concatenated ranges `first[i], …, first[i] + counts[i] - 1` of all pieces i."""
    range_starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(first - range_starts, counts)


def write_store(
    folder: str | os.PathLike[str],
    batches: Iterable[EncodedDocuments],
    *,
    vocab_size: int,
    encoder: str,
    about: dict[str, object],
    columns: int = 1,
    tally: Tally | None = None,
) -> TokenStore:
    """Write a store and open it; if another process wrote the store first, open that store.

    Args:
        folder: folder of the store.
        batches: the encoded documents.
        vocab_size: upper bound of the ids; up to 65536, an id has two bytes.
        encoder: fingerprint of the encoder.
        about: additional JSON values of `meta.json`, for people who inspect the folder.
        columns: number of sequences of each document.
        tally: statistics of the rows; complete when `batches` is exhausted.

    Raises:
        DataError: the folder cannot be written.
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
                return TokenStore(folder)  # another process wrote the store first
            except DataError:
                shutil.rmtree(folder)  # an incomplete store, or an older version
                part.rename(folder)
    return TokenStore(folder)


_NONE = np.empty(0, np.uint64)


def _fill(
    folder: Path,
    batches: Iterable[EncodedDocuments],
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
            has_contents = batch.contents is not None
            contents.append(np.array(batch.contents, np.uint64) if has_contents else digests[-1])
    if not masked:
        (folder / "loss_mask.bin").unlink()
    if not width:
        (folder / "values.bin").unlink()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    offsets.tofile(folder / "offsets.bin")
    np.concatenate(contents).tofile(folder / "hashes.bin")
    documents = np.concatenate(digests)
    if any(stored is not hashed for stored, hashed in zip(contents, digests, strict=True)):
        documents.tofile(folder / _DIGESTS)
    meta = {
        "version": STORE_VERSION,
        "dtype": dtype.name,
        "loss_mask": masked,
        "values": width,
        "documents": len(documents),
        "tokens": int(offsets[-1]),
        "digest": compute_digest(documents, encoder),
        "tally": tally.as_json(),
        **about,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, default=str))


def compute_digest(hashes: NDArray[np.uint64], encoder: str) -> str:
    """Hash the documents, in order, and their encoder; equal hashes mean equal tokens."""
    return hashlib.blake2b(hashes.tobytes() + encoder.encode(), digest_size=16).hexdigest()


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
