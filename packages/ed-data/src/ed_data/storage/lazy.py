"""The tokens of documents, made when they are asked for and forgotten again: nothing is on disk.

`pack_on_the_fly` reads from them. In memory are the places of the documents in their files, their
hashes and lengths (about 50 bytes a document), and the tokens that were asked for last.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.order.mixing import IntArray
from ed_data.rows.documents import Documents, Placed, Tally
from ed_data.schema import Example
from ed_data.sources import Cursor
from ed_data.sources.lines import Spot
from ed_data.storage.store import digest_of
from ed_data.tokens.parallel import Encoding, Job

#: Tokens that are kept, about 128 MiB of them.
KEPT = 2**25
_NEAR = 64  # rows to read over rather than to look for the place of the next one

#: Tokens, loss mask and values of each column of a document.
_Columns = list[tuple[NDArray[np.int32], NDArray[Any], NDArray[Any]]]


class Numbered(Protocol):
    """Documents by number."""

    def __iter__(self) -> Iterator[Example]: ...

    def __getitem__(self, number: int, /) -> Example: ...


class ReadAgain:
    """The documents of an inform by number, read from their files each time.

    Iterating over all of them, which comes first, notes where each begins. Asked for in ascending
    order, they cost one pass over the files at most.
    """

    def __init__(self, documents: Documents) -> None:
        self._first = documents
        # The second reading counts nothing again.
        self._again = Documents(documents.inform, documents.source, documents.schema)
        self._places = array("q")
        self._open: tuple[int, int, Iterator[Placed]] | None = None

    @property
    def tally(self) -> Tally:
        """What became of the rows."""
        return self._first.tally

    def __iter__(self) -> Iterator[Example]:
        self._places = array("q")
        for placed in self._first.placed():
            if placed.example is not None:
                shard, spot = placed.at
                self._places.extend((shard, *spot))
                yield placed.example

    def __getitem__(self, number: int, /) -> Example:
        shard, row, offset = self._places[3 * number : 3 * number + 3]
        passed, stream = -1, None
        if self._open is not None and self._open[0] == shard:
            _, passed, stream = self._open
        if stream is None or not passed < row <= passed + _NEAR:
            stream = self._again.read(shard, Spot(row, offset))
        self._open = None
        for placed in stream:
            if placed.at == Cursor(shard, Spot(row, offset)):
                assert placed.example is not None
                self._open = (shard, row, stream)
                return placed.example
        raise RuntimeError(f"{self._first.inform.label!r}: its files changed while they were read")


class LazyTokens:
    """Documents that are encoded when they are first asked for, in batches. See `store.Tokens`.

    Args:
        documents: a list of them, or `ReadAgain`.
        encoding: makes the tokens.
        label: the inform's name, for messages.
        tally: counts documents that cannot be encoded, where they may be skipped.
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
        digests, contents = array("Q"), array("Q")
        for document in documents:
            digests.append(document.digest)
            contents.append(document.content_digest)
        self.hashes = np.array(contents, np.uint64)
        self.digest = digest_of(np.array(digests, np.uint64), encoder.fingerprint)
        self._lengths = np.full((len(contents), self.columns), -1, np.int32)
        self._encoded = 0
        self._kept: OrderedDict[int, _Columns] = OrderedDict()
        self._size = 0  # tokens in `_kept`
        self._lock = threading.Lock()

    @property
    def encoded(self) -> int:
        """Number of documents that have been asked for so far."""
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
        tokens = self._pieces(documents, starts, counts, column, 0)
        if not self._encoder.has_loss_mask:
            return tokens, None
        return tokens, self._pieces(documents, starts, counts, column, 1).astype(bool)

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """See `store.Tokens.values`."""
        return self._pieces(documents, starts, counts, column, 2)

    def _pieces(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int, which: int
    ) -> NDArray[Any]:
        """Pieces of the tokens (0), masks (1) or values (2) of documents, joined."""
        numbers = documents.tolist()
        with self._lock:
            columns = {n: self._kept[n] for n in set(numbers) if n in self._kept}
            columns.update(self._encode(n for n in set(numbers) if n not in columns))
        return np.concatenate(
            [
                columns[n][column][which][start : start + count]
                for n, start, count in zip(numbers, starts.tolist(), counts.tolist(), strict=True)
            ]
        )

    def _encode(self, numbers: Iterable[int]) -> Iterator[tuple[int, _Columns]]:
        wanted = sorted({int(n) for n in numbers})
        size = self._encoder.batch_size
        batches = [wanted[at : at + size] for at in range(0, len(wanted), size)]
        for batch, encoded in zip(
            batches, self._encoding.map(map(self._job, batches)), strict=True
        ):
            # Tokens stand in for masks and values that nobody reads.
            tokens = [ids.astype(np.int32) for ids in encoded.tokens]
            masks, values = encoded.masks or tokens, encoded.values or tokens
            pairs: _Columns = list(zip(tokens, masks, values, strict=True))
            for i, n in enumerate(batch):
                columns = pairs[i * self.columns : (i + 1) * self.columns]
                self._encoded += int(self._lengths[n, 0] < 0)
                self._lengths[n] = [len(ids) for ids, *_ in columns]
                self._keep(n, columns)
                yield n, columns

    def _job(self, batch: list[int]) -> Job:
        tally = None
        if self._skip:  # what was counted once is not counted again
            fresh = bool((self._lengths[batch, 0] < 0).all())
            tally = self.tally if fresh else Tally()
        return Job([self._documents[n] for n in batch], self._label, tally)

    def _keep(self, number: int, columns: _Columns) -> None:
        self._kept[number] = columns
        self._size += sum(len(ids) for ids, *_ in columns)
        while self._size > KEPT and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._size -= sum(len(ids) for ids, *_ in old)
