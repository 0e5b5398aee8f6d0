"""The streamed order: documents are read, encoded, shuffled and packed window by window.

A window is packed by itself, so it is a pure function of the options, the seed and its first
document; the state is where the window begins in each inform, and the row in the window that comes
next. To go on there, one window is read again and nothing else. In memory are two windows at most:
the one that batches are made of, and the next, which a thread prepares meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ed_data.order.mixing import IntArray, permutation
from ed_data.order.packing import pack
from ed_data.order.plan import RowOptions, Rows, Window, has_labels, no_labels, one_per_row
from ed_data.order.reading import Drawn, Mark, MixedDocuments
from ed_data.rows.documents import Tally
from ed_data.storage.store import digest_of, joined
from ed_data.tokens.encoder import Encoded
from ed_data.tokens.parallel import Encoding, Job

#: Documents of a window, at least: enough for best-fit to fill rows to 99 %.
WINDOW = 4096
#: A window of longer documents ends at as many tokens: 64 MiB.
TOKENS = 2**24
_ENCODED = 256  # documents that are encoded together
_WINDOWS, _ROWS = 7, 8  # name uses of the seed, as in mixture


class WindowTokens:
    """The tokens of the documents of one window. See `store.Tokens`.

    Args:
        tokens: one array for each column of each document, document after document.
        masks: 1 where a token has loss, likewise; None where each has.
        columns: sequences of each document.
        values: of each token, likewise.
    """

    complete = True

    def __init__(
        self,
        tokens: list[NDArray[np.int32]],
        masks: list[NDArray[np.uint8]] | None,
        columns: int,
        values: list[NDArray[np.float32]] | None = None,
    ) -> None:
        self.columns = columns
        self._values = np.empty((0, 0), np.float32) if not values else np.concatenate(values)
        self.hashes = np.empty(0, np.uint64)
        self.digest = digest_of(self.hashes, "stream")
        self.tally = Tally()
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._tokens = np.concatenate([np.empty(0, np.int32), *tokens])
        self._mask = None if masks is None else np.concatenate([np.empty(0, np.uint8), *masks])

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """See `store.Tokens.lengths`."""
        if column is None and self.columns > 1:
            return np.max([self.lengths(documents, c) for c in range(self.columns)], axis=0)
        at = documents * self.columns + (column or 0)
        return self._offsets[at + 1] - self._offsets[at]

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `store.Tokens.gather`."""
        first = self._offsets[documents * self.columns + column] + starts
        index = joined(first, counts)
        return self._tokens[index], None if self._mask is None else self._mask[index].astype(bool)

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """See `store.Tokens.values`."""
        return self._values[
            joined(self._offsets[documents * self.columns + column] + starts, counts)
        ]


@dataclass(frozen=True)
class StreamWindow:
    """A window that is ready.

    Attributes:
        number: windows before it.
        begins: the state of the documents where it begins.
        row: rows before it.
        tokens: its documents.
        window: its rows.
        ends_epoch: whether an epoch ends with it.
        drawn: documents of each inform.
    """

    number: int
    begins: dict[str, Any]
    row: int
    tokens: WindowTokens
    window: Window
    ends_epoch: bool
    drawn: list[int]


#: Tokens, loss mask and values of one column of a document.
_Columns = tuple[NDArray[np.int32], NDArray[Any], NDArray[Any]]
_NO: tuple[list[Any], ...] = ([], [], [])


@dataclass
class _Batch:
    """Documents that are encoded together.

    Attributes:
        documents: as they were read.
        ends_epoch: whether an epoch ends behind them.
        after: where reading is behind them.
        columns: of each document, in their order; None where the tokens are not there yet.
        places: of each inform whose documents are being encoded, the numbers of these.
        skipped: of each inform, the documents that could not be encoded.
    """

    documents: list[Drawn]
    ends_epoch: bool
    after: Mark
    columns: list[Any]
    places: list[list[int]] = field(default_factory=list)
    skipped: dict[int, Tally] = field(default_factory=dict)

    def fill(self, places: list[int], encoded: Encoded, width: int) -> None:
        """Take the tokens of the documents at some places."""
        tokens = [ids.astype(np.int32) for ids in encoded.tokens]
        # Tokens stand in for masks and values that nobody reads.
        masks, values = encoded.masks or tokens, encoded.values or tokens
        columns = list(zip(tokens, masks, values, strict=True))
        for number, place in enumerate(places):
            own = columns[number * width : (number + 1) * width]
            self.columns[place * width : (place + 1) * width] = own


class StreamPlan:
    """The rows of a stream, batch after batch; see `plan.StreamedOrder`.

    Args:
        documents: what is read.
        encoding: makes the tokens.
        options: how documents become rows.
        buffer: documents that change places with each other; None: all of a window; 0 or 1: none.
        ahead: prepare the next window in a thread.
    """

    def __init__(
        self,
        documents: MixedDocuments,
        encoding: Encoding,
        options: RowOptions,
        buffer: int | None,
        ahead: bool,
    ) -> None:
        self._documents, self._encoding, self._options = documents, encoding, options
        self._encoder = encoding.encoder
        self._buffer, self.endless = buffer, options.endless
        self._size = max(WINDOW, buffer or 0)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ed-data") if ahead else None
        self._next: Future[StreamWindow] | None = None
        self._number = 0  # of the window that is made next
        self._first_row = 0  # rows before it
        self._window: StreamWindow | None = None
        self._row = 0
        self._over = False
        self._failure: Exception | None = None
        self._figures = {"windows": 0, "documents": 0, "rows": 0, "tokens": 0, "tokens_cut": 0}
        self._drawn = [0] * len(documents.passes)

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of the windows that were read since the start, or the last resume.

        `windows`, `documents`, `rows`, `tokens`, `tokens_cut` and `fill`, as `RowPlan.stats`, and
        per source the `documents` that were drawn and the rows that were `dropped`, by reason.
        """
        rows = max(self._figures["rows"] * self._options.seq_length, 1)
        sources = {}
        for each, count in zip(self._documents.passes, self._drawn, strict=True):
            sources[each.label] = {"documents": count}
            if each.documents.tally.dropped:
                sources[each.label]["dropped"] = dict(each.documents.tally.dropped)
        return {**self._figures, "fill": self._figures["tokens"] / rows, "sources": sources}

    def __next__(self) -> Rows:
        """Return the rows of the next batch.

        Raises:
            StopIteration: the epoch is over, and no other follows.
            DataError: a row cannot be read or encoded.
        """
        left, pieces, sources = self._options.batch_size, [np.empty((6, 0), np.int64)], []
        while left and not self._over:
            ready = self._window
            if ready is None:
                ready = self._window = self._take()
            packing = ready.window.packing
            taken = min(left, packing.rows - self._row)
            if taken:
                number = self._options.batch_size - left
                pieces.append(_pieces(ready, self._row, taken, number, len(sources)))
                sources.append(ready.tokens)
            left -= taken
            self._row += taken
            if self._row == packing.rows and left:
                self._window, self._row = None, 0
                self._over = ready.ends_epoch and not self.endless
        if left == self._options.batch_size:
            raise StopIteration
        return Rows(sources, *np.concatenate(pieces, axis=1))

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is: where its window begins in each inform, and the row in it."""
        if self._window is not None:
            number, begins, before = self._window.number, self._window.begins, self._window.row
        else:  # at the beginning, or at the end
            number, begins, before = self._number, self._documents.state_dict(), self._first_row
        return {
            "over": self._over,
            "window": number,
            "rows_before": before,
            "row": self._row,
            "documents": begins,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        self._settle()
        self._window, self._over, self._failure = None, state["over"], None
        self._number, self._row = state["window"], state["row"]
        # A state of an earlier version has no such number, nor weights that follow the steps.
        self._first_row = state.get("rows_before", 0)
        if not self._over:
            self._documents.load_state_dict(state["documents"])

    def close(self) -> None:
        """Stop preparing windows."""
        self._settle()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._encoding.close()

    def _settle(self) -> None:
        ahead, self._next = self._next, None
        if ahead is not None and not ahead.cancel():
            ahead.exception()  # wait: it reads from the documents

    def _take(self) -> StreamWindow:
        if self._failure is not None:  # going on would leave out what was read with it
            raise self._failure
        try:
            ready = self._make() if self._next is None else self._next.result()
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._next = None
        if self._pool is not None and (self.endless or not ready.ends_epoch):
            self._next = self._pool.submit(self._make)
        figures, window = self._figures, ready.window
        figures["windows"] += 1
        figures["documents"] += sum(ready.drawn)
        figures["rows"] += window.packing.rows
        figures["tokens"] += window.packing.tokens
        figures["tokens_cut"] += window.dropped
        self._drawn = [a + b for a, b in zip(self._drawn, ready.drawn, strict=True)]
        return ready

    def _make(self) -> StreamWindow:
        begins, number, row = self._documents.state_dict(), self._number, self._first_row
        self._documents.at_step(row // self._options.batch_size)
        columns, skipped, drawn = (
            list[_Columns](),
            list[dict[int, Tally]](),
            [0] * len(self._documents.passes),
        )
        read = size = 0
        ends_epoch = False
        for batch in self._batches():
            columns += batch.columns
            skipped.append(batch.skipped)
            ends_epoch = batch.ends_epoch
            read += len(batch.documents)
            for document in batch.documents:
                drawn[document.inform] += 1
            size += sum(len(ids) for ids, *_ in batch.columns)
            if size >= TOKENS:
                self._documents.rewind(batch.after)  # processes may be ahead
                break
        for inform, tally in (pair for each in skipped for pair in each.items()):
            self._documents.passes[inform].documents.tally.add(tally)
        ids, masks, values = (list(each) for each in zip(*columns, strict=True)) if columns else _NO
        tokens = WindowTokens(
            ids,
            masks if self._encoder.has_loss_mask else None,
            len(self._encoder.schema.columns),
            values if self._encoder.schema.values else None,
        )
        window = self._pack(tokens, read, number)
        if number == 0 and self._encoder.has_loss_mask and not has_labels([tokens], window):
            raise no_labels(read, window.dropped)
        self._number += 1
        self._first_row += window.packing.rows
        return StreamWindow(number, begins, row, tokens, window, ends_epoch, drawn)

    def _batches(self) -> Iterator[_Batch]:
        """The documents from here on with their tokens, until there are enough for a window."""
        reading = deque[_Batch]()

        def jobs() -> Iterator[Job]:
            for batch in self._read():
                reading.append(batch)
                for number, each in enumerate(self._documents.passes):
                    at = [i for i, d in enumerate(batch.documents) if d.inform == number]
                    if at:
                        batch.places.append(at)
                        tally = None
                        if each.documents.inform.on_error == "skip":
                            tally = batch.skipped.setdefault(number, Tally())
                        yield Job([batch.documents[i].example for i in at], each.label, tally)

        width = len(self._encoder.schema.columns)
        for encoded in self._encoding.map(jobs()):
            batch = reading[0]
            batch.fill(batch.places.pop(0), encoded, width)
            if None not in batch.columns:
                yield reading.popleft()
        yield from reading  # an epoch that ends without another document

    def _read(self) -> Iterator[_Batch]:
        """The documents from here on, as many as a window has at most."""
        left, over = self._size, False
        width = len(self._encoder.schema.columns)
        while left and not over:
            documents: list[Drawn] = []
            while len(documents) < min(_ENCODED, left):
                document = self._documents.next()
                if document is None:
                    over = True
                    break
                documents.append(document)
            left -= len(documents)
            columns: list[Any] = [None] * (len(documents) * width)
            yield _Batch(documents, over, self._documents.mark(), columns)

    def _pack(self, tokens: WindowTokens, documents: int, number: int) -> Window:
        options, key = self._options, (self._options.seed, number)
        order = permutation(documents, _WINDOWS, *key, buffer=self._buffer)
        lengths, dropped = tokens.lengths(order), 0
        if options.max_length is not None:
            kept = np.minimum(lengths, options.max_length)
            dropped = int((lengths - kept).sum())
            lengths = kept
        if options.strategy is None:
            packing = one_per_row(lengths, options.seq_length)
        else:
            packing = pack(lengths, options.seq_length, options.strategy)
        if options.shuffle_rows is not None:
            packing = packing.reordered(
                permutation(packing.rows, _ROWS, *key, buffer=options.shuffle_rows)
            )
        return Window(np.zeros_like(order), order, packing, dropped)


def _pieces(ready: StreamWindow, row: int, rows: int, number: int, source: int) -> IntArray:
    """The pieces of some rows of a window, as the fields of `Rows` after `tokens`."""
    packing, window = ready.window.packing, ready.window
    part = slice(packing.row_offsets[row], packing.row_offsets[row + rows])
    counts = np.diff(packing.row_offsets[row : row + rows + 1])
    which = packing.document[part]
    segment = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return np.stack(
        [
            np.full(len(which), source, np.int64),
            window.document[which],
            packing.start[part],
            packing.length[part],
            np.repeat(np.arange(number, number + rows), counts),
            segment,
        ]
    )
