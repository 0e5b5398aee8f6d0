"""The streamed order: documents are read, encoded, shuffled and packed window by window.

A window is packed by itself, so it is a pure function of the options, the seed and its first
document; the state is where the window begins in each inform, and the row in the window that comes
next. To go on there, one window is read again and nothing else. In memory are two windows at most:
the one that batches are made of, and the next, which a thread prepares meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ed_data.mixture import IntArray, permutation
from ed_data.packing import pack
from ed_data.plan import RowOptions, Rows, Window, has_labels, no_labels, one_per_row
from ed_data.reading import Drawn, MixedDocuments
from ed_data.store import digest_of, joined
from ed_data.tokenize import Encoder
from ed_data.transforms import Tally

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
        tokens: its documents.
        window: its rows.
        ends_epoch: whether an epoch ends with it.
        drawn: documents of each inform.
    """

    number: int
    begins: dict[str, Any]
    tokens: WindowTokens
    window: Window
    ends_epoch: bool
    drawn: list[int]


class StreamPlan:
    """The rows of a stream, batch after batch; see `plan.StreamedOrder`.

    Args:
        documents: what is read.
        encoder: makes the tokens.
        options: how documents become rows.
        buffer: documents that change places with each other; None: all of a window; 0 or 1: none.
        ahead: prepare the next window in a thread.
    """

    def __init__(
        self,
        documents: MixedDocuments,
        encoder: Encoder,
        options: RowOptions,
        buffer: int | None,
        ahead: bool,
    ) -> None:
        self._documents, self._encoder, self._options = documents, encoder, options
        self._buffer, self.endless = buffer, options.endless
        self._size = max(WINDOW, buffer or 0)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ed-data") if ahead else None
        self._next: Future[StreamWindow] | None = None
        self._number = 0  # of the window that is made next
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
            number, begins = self._window.number, self._window.begins
        else:  # at the beginning, or at the end
            number, begins = self._number, self._documents.state_dict()
        return {"over": self._over, "window": number, "row": self._row, "documents": begins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        self._settle()
        self._window, self._over, self._failure = None, state["over"], None
        self._number, self._row = state["window"], state["row"]
        if not self._over:
            self._documents.load_state_dict(state["documents"])

    def close(self) -> None:
        """Stop preparing windows."""
        self._settle()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

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
        begins, number = self._documents.state_dict(), self._number
        ids: list[NDArray[np.int32]] = []
        masks: list[NDArray[Any]] = []
        values: list[NDArray[Any]] = []
        drawn = [0] * len(self._documents.passes)
        read = size = 0
        ends_epoch = False
        while read < self._size and size < TOKENS and not ends_epoch:
            batch: list[Drawn] = []
            while len(batch) < min(_ENCODED, self._size - read):
                document = self._documents.next()
                if document is None:
                    ends_epoch = True
                    break
                batch.append(document)
                drawn[document.inform] += 1
            read += len(batch)
            for tokens, mask, value in self._encode(batch):
                ids.append(tokens)
                masks.append(mask)
                values.append(value)
                size += len(tokens)
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
        return StreamWindow(number, begins, tokens, window, ends_epoch, drawn)

    def _encode(
        self, batch: list[Drawn]
    ) -> Sequence[tuple[NDArray[np.int32], NDArray[Any], NDArray[Any]]]:
        """Tokens, masks and values of the columns of each document, in the order of the batch."""
        columns = len(self._encoder.schema.columns)
        result: list[Any] = [None] * (len(batch) * columns)
        for number, each in enumerate(self._documents.passes):
            at = [i for i, document in enumerate(batch) if document.inform == number]
            if not at:
                continue
            tally = each.documents.tally if each.documents.inform.on_error == "skip" else None
            encoded = self._encoder.encode([batch[i].example for i in at], each.label, tally)
            tokens = [ids.astype(np.int32) for ids in encoded.tokens]
            # Tokens stand in for masks and values that nobody reads.
            masks, values = encoded.masks or tokens, encoded.values or tokens
            pairs = list(zip(tokens, masks, values, strict=True))
            for place, i in enumerate(at):
                own = pairs[place * columns : (place + 1) * columns]
                result[i * columns : (i + 1) * columns] = own
        return result

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
