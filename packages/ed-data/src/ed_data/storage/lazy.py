"""Tokens that are encoded when they are first requested; nothing is written to disk.

`pack_on_the_fly` and rows with images or recordings use them. Memory contains the positions of the
documents in their files, their hashes and lengths (about 50 bytes per document), and the most
recent tokens.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.rows.documents import Documents, Placed, Tally
from ed_data.rows.example import Example, RowMedium
from ed_data.sources import Cursor
from ed_data.sources.lines import Spot
from ed_data.storage.store import compute_digest
from ed_data.tokens.encoded import IntArray, SequenceArrays
from ed_data.tokens.parallel import Encoding, EncodingJob

#: Number of tokens in memory, about 128 MiB.
MAX_STORED_TOKENS = 2**25
_NEAR = 64  # rows that are skipped by reading instead of seeking


class Numbered(Protocol):
    """Documents by number."""

    def __iter__(self) -> Iterator[Example]: ...

    def __getitem__(self, number: int, /) -> Example: ...


class ReadAgain:
    """The documents of an inform by number, read from their files at each access.

    The first use must be an iteration over all documents, which records their positions. Access in
    ascending order costs at most one pass over the files.
    """

    def __init__(self, documents: Documents) -> None:
        self._first = documents
        # A second reader, so that repeated reads do not change the tally.
        self._again = Documents(
            documents.inform,
            documents.source,
            documents.schema,
            media=documents.media,
            tools=documents.tools,
        )
        self._places = array("q")
        self._open: tuple[int, Spot, Iterator[Placed]] | None = None

    @property
    def tally(self) -> Tally:
        """Statistics of the rows."""
        return self._first.tally

    def __iter__(self) -> Iterator[Example]:
        self._places = array("q")
        for placed in self._first.iterate_rows():
            if placed.example is not None:
                shard, spot = placed.at
                self._places.extend((shard, *spot))
                yield placed.example

    def __getitem__(self, number: int, /) -> Example:
        shard, row, offset, part = self._places[4 * number : 4 * number + 4]
        spot = Spot(row, offset, part)
        passed, stream = spot, None
        if self._open is not None and self._open[0] == shard:
            _, passed, stream = self._open
        if stream is None or not (passed < spot and row <= passed.row + _NEAR):
            stream = self._again.read(shard, spot)
        self._open = None
        for placed in stream:
            if placed.at == Cursor(shard, spot):
                assert placed.example is not None
                self._open = (shard, spot, stream)
                return placed.example
        raise RuntimeError(
            f"the files of inform {self._first.inform.label!r} changed while they were read"
        )


class LazyTokens:
    """Documents that are encoded in batches when they are first requested. See `store.Tokens`.

    Args:
        documents: a list of documents, or `ReadAgain`.
        encoding: encodes documents.
        label: name of the inform, for messages.
        tally: statistics of the rows.
        skip: count documents that cannot be encoded in `tally`; otherwise they raise an error.
    """

    complete = True

    def __init__(
        self,
        documents: Numbered,
        encoding: Encoding,
        label: str,
        tally: Tally | None = None,
        skip: bool = False,
    ) -> None:
        self._documents, self._encoding, self._label = documents, encoding, label
        self.tally = tally or Tally()
        self._skip = skip
        encoder = self._encoder = encoding.encoder
        self.columns = len(encoder.schema.columns)
        digests, contents, media = array("Q"), array("Q"), array("H")
        for document in documents:
            digests.append(document.digest)
            contents.append(document.content_digest)
            media.append(len(document.media))
        self.hashes = np.array(contents, np.uint64)
        self.digests = np.array(digests, np.uint64)
        self.digest = compute_digest(self.digests, encoder.fingerprint)
        self._media_counts = np.array(media, np.int64)
        self._lengths = np.full((len(contents), self.columns), -1, np.int32)
        self._encoded = 0
        self._kept: OrderedDict[int, list[SequenceArrays]] = OrderedDict()
        self._size = 0  # tokens in `_kept`
        self._lock = threading.Lock()

    @property
    def encoded(self) -> int:
        """Number of documents that have been encoded."""
        return self._encoded

    @property
    def kept(self) -> int:
        """Number of tokens in memory."""
        return self._size

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """See `store.Tokens.lengths`."""
        with self._lock:
            for _ in self._encode(documents[self._lengths[documents, 0] < 0]):
                pass
        lengths = self._lengths[documents].astype(np.int64)
        return lengths.max(axis=1) if column is None else lengths[:, column]

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `store.Tokens.gather`."""
        pieces = self._pieces(documents, starts, counts, column)
        tokens = np.concatenate([piece.tokens for piece in pieces])
        if not self._encoder.has_loss_mask:
            return tokens, None
        return tokens, np.concatenate([piece.mask for piece in pieces]).astype(bool)

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """See `store.Tokens.values`."""
        pieces = self._pieces(documents, starts, counts, column)
        return np.concatenate([piece.values for piece in pieces])

    def media_counts(self, documents: IntArray) -> IntArray:
        """See `store.Tokens.media_counts`."""
        return self._media_counts[documents]

    def media(self, document: int) -> Sequence[RowMedium]:
        """See `store.Tokens.media`."""
        if not self._media_counts[document]:
            return ()
        with self._lock:
            return self._documents[document].media

    def _pieces(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int
    ) -> list[SequenceArrays]:
        numbers = documents.tolist()
        with self._lock:
            columns = {n: self._kept[n] for n in set(numbers) if n in self._kept}
            columns.update(self._encode(n for n in set(numbers) if n not in columns))
        return [
            columns[n][column].part(start, start + count)
            for n, start, count in zip(numbers, starts.tolist(), counts.tolist(), strict=True)
        ]

    def _encode(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[SequenceArrays]]]:
        sorted_numbers = sorted({int(n) for n in numbers})
        size = self._encoder.batch_size
        batches = [sorted_numbers[at : at + size] for at in range(0, len(sorted_numbers), size)]
        for batch, encoded in zip(
            batches, self._encoding.map(map(self._job, batches)), strict=True
        ):
            sequences = encoded.sequences()
            for i, n in enumerate(batch):
                columns = sequences[i * self.columns : (i + 1) * self.columns]
                self._encoded += int(self._lengths[n, 0] < 0)
                self._lengths[n] = [len(sequence.tokens) for sequence in columns]
                self._keep(n, columns)
                yield n, columns

    def _job(self, batch: list[int]) -> EncodingJob:
        tally = None
        if self._skip:  # count each document once
            fresh = bool((self._lengths[batch, 0] < 0).all())
            tally = self.tally if fresh else Tally()
        return EncodingJob([self._documents[n] for n in batch], self._label, tally)

    def _keep(self, number: int, columns: list[SequenceArrays]) -> None:
        self._kept[number] = columns
        self._size += sum(len(sequence.tokens) for sequence in columns)
        while self._size > MAX_STORED_TOKENS and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._size -= sum(len(sequence.tokens) for sequence in old)
