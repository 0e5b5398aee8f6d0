"""The streamed order: documents are read, encoded, shuffled and packed window by window.

Each window is packed separately. It is a pure function of the options, the seed and its first
document. The state contains the position of each inform at the beginning of the window, and the
next row of the window, so resuming reads one window again. Memory contains at most two windows: the
current window, and the next window, which a thread prepares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ed_data.order.mixing import permutation
from ed_data.order.reading import Drawn, Mark, MixedDocuments
from ed_data.order.windows import PlannedRows, RowOptions, Window, plan_rows
from ed_data.rows.documents import Tally
from ed_data.rows.example import RowMedium
from ed_data.storage.store import TokenArrays
from ed_data.tokens.encoded import EncodedDocuments, SequenceArrays
from ed_data.tokens.parallel import Encoding, EncodingJob

#: Minimum number of documents of a window: enough for best-fit to fill rows to 99 %.
WINDOW_DOCUMENTS = 4096
#: Number of tokens (64 MiB) at which a window of long documents ends.
WINDOW_TOKENS = 2**24
_ENCODED = 256  # documents that are encoded together
_WINDOWS, _ROWS = 7, 8  # identify uses of the seed, as in mixing


@dataclass(frozen=True)
class StreamWindow:
    """A window that is ready.

    Attributes:
        number: number of windows before this window.
        begins: state of the documents at the beginning of the window.
        row: number of rows before the window.
        window: the rows.
        ends_epoch: whether an epoch ends with the window.
        drawn: number of documents of each inform.
    """

    number: int
    begins: dict[str, Any]
    row: int
    window: Window
    ends_epoch: bool
    drawn: list[int]


@dataclass
class _Batch:
    """Documents that are encoded together.

    Attributes:
        documents: in the order of the stream.
        ends_epoch: whether an epoch ends after the documents.
        end_mark: position of the stream after the documents.
        sequences: sequences of each document, in order; None until they are encoded.
        places: numbers of the documents of each inform that is being encoded.
        skipped: documents of each inform that could not be encoded.
    """

    documents: list[Drawn]
    ends_epoch: bool
    end_mark: Mark
    sequences: list[SequenceArrays | None]
    places: list[list[int]] = field(default_factory=list)
    skipped: dict[int, Tally] = field(default_factory=dict)

    def fill(self, places: list[int], encoded: EncodedDocuments, width: int) -> None:
        """Store the sequences of the documents with these numbers."""
        sequences = encoded.sequences()
        for number, place in enumerate(places):
            document_sequences = sequences[number * width : (number + 1) * width]
            self.sequences[place * width : (place + 1) * width] = document_sequences


class StreamPlan:
    """The rows of a stream, batch after batch; see `windows.StreamedOrder`.

    Args:
        documents: the documents.
        encoding: encodes documents.
        options: how documents become rows.
        buffer: number of documents that are shuffled together; None: all of a window; 0 or 1: none.
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
        self._size = max(WINDOW_DOCUMENTS, buffer or 0)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ed-data") if ahead else None
        self._next: Future[StreamWindow] | None = None
        self._number = 0  # of the window that is prepared next
        self._first_row = 0  # rows before that window
        self._window: StreamWindow | None = None
        self._row = 0
        self._over = False
        self._failure: Exception | None = None
        self._figures = {"windows": 0, "documents": 0, "rows": 0, "tokens": 0, "tokens_cut": 0}
        self._drawn = [0] * len(documents.passes)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the windows that were read since the start, or since the last resume.

        `windows`, `documents`, `rows`, `tokens`, `tokens_cut` and `fill`, as in `RowPlan.stats`,
        and for each source the number of `documents` drawn and of rows `dropped`, by reason.
        """
        rows = max(self._figures["rows"] * self._options.seq_length, 1)
        sources = {}
        for source_passes, count in zip(self._documents.passes, self._drawn, strict=True):
            sources[source_passes.label] = {"documents": count}
            if source_passes.documents.tally.dropped:
                sources[source_passes.label]["dropped"] = dict(
                    source_passes.documents.tally.dropped
                )
        return {**self._figures, "fill": self._figures["tokens"] / rows, "sources": sources}

    def __next__(self) -> PlannedRows:
        """Return the rows of the next batch.

        Raises:
            StopIteration: the epoch has ended, and there is no other epoch.
            DataError: a row cannot be read or encoded.
        """
        parts = list(self._parts())
        if not parts:
            raise StopIteration
        return plan_rows(parts)

    def _parts(self) -> Iterator[tuple[Window, int, int]]:
        remaining_rows = self._options.batch_size
        while remaining_rows and not self._over:
            ready = self._window
            if ready is None:
                ready = self._window = self._take()
            row_count = min(remaining_rows, ready.window.packing.rows - self._row)
            if row_count:
                yield ready.window, self._row, row_count
            remaining_rows -= row_count
            self._row += row_count
            if self._row == ready.window.packing.rows and remaining_rows:
                self._window, self._row = None, 0
                self._over = ready.ends_epoch and not self.endless

    def state_dict(self) -> dict[str, Any]:
        """Return the position: of each inform at the beginning of the window, and the next row."""
        if self._window is not None:
            number, begins, rows_before = self._window.number, self._window.begins, self._window.row
        else:  # at the beginning or at the end
            number = self._number
            begins = self._documents.state_dict()
            rows_before = self._first_row
        return {
            "over": self._over,
            "window": number,
            "rows_before": rows_before,
            "row": self._row,
            "documents": begins,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state."""
        self._settle()
        self._window, self._over, self._failure = None, state["over"], None
        self._number, self._row = state["window"], state["row"]
        # States of earlier versions have neither this number nor scheduled weights.
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
            ahead.exception()  # wait, because the thread reads from the documents

    def _take(self) -> StreamWindow:
        if self._failure is not None:  # continuing would omit documents
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
        figures["tokens_cut"] += window.truncated
        self._drawn = [a + b for a, b in zip(self._drawn, ready.drawn, strict=True)]
        return ready

    def _make(self) -> StreamWindow:
        begins, number, row = self._documents.state_dict(), self._number, self._first_row
        self._documents.at_step(row // self._options.batch_size)
        sequences, media = list[SequenceArrays](), list[tuple[RowMedium, ...]]()
        skipped, drawn = list[dict[int, Tally]](), [0] * len(self._documents.passes)
        size, ends_epoch = 0, False
        for batch in self._batches():
            batch_sequences = [sequence for sequence in batch.sequences if sequence is not None]
            sequences += batch_sequences
            skipped.append(batch.skipped)
            ends_epoch = batch.ends_epoch
            for document in batch.documents:
                drawn[document.inform] += 1
                media.append(document.example.media)
            size += sum(len(sequence.tokens) for sequence in batch_sequences)
            if size >= WINDOW_TOKENS:
                self._documents.rewind(batch.end_mark)  # worker processes may have read ahead
                break
        for inform, tally in (pair for sequence in skipped for pair in sequence.items()):
            self._documents.passes[inform].documents.tally.add(tally)
        window = self._pack_window(sequences, media, number)
        if number == 0 and self._encoder.has_loss_mask:
            window.check_labels()
        self._number += 1
        self._first_row += window.packing.rows
        return StreamWindow(number, begins, row, window, ends_epoch, drawn)

    def _pack_window(
        self, sequences: list[SequenceArrays], media: list[tuple[RowMedium, ...]], number: int
    ) -> Window:
        lengths = np.fromiter(
            (len(sequence.tokens) for sequence in sequences), np.int64, len(sequences)
        )
        schema = self._encoder.schema
        width = len(schema.values)
        values = [
            np.empty((0, width), np.float32),
            *(sequence.values for sequence in sequences if width),
        ]
        mask = None
        if self._encoder.has_loss_mask:
            mask = np.concatenate(
                [np.empty(0, np.uint8), *(sequence.mask for sequence in sequences)]
            )
        tokens = TokenArrays(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            np.concatenate([np.empty(0, np.int32), *(sequence.tokens for sequence in sequences)]),
            mask,
            np.concatenate(values),
            len(schema.columns),
            media if any(media) else (),
        )
        key = (self._options.seed, number)
        order = permutation(len(media), _WINDOWS, *key, buffer=self._buffer)
        return Window.pack_documents(
            [tokens], np.zeros_like(order), order, self._options, (_ROWS, *key)
        )

    def _batches(self) -> Iterator[_Batch]:
        """Yield encoded documents from the current position, until a window is complete."""
        reading = deque[_Batch]()

        def jobs() -> Iterator[EncodingJob]:
            for batch in self._read():
                reading.append(batch)
                for number, source_passes in enumerate(self._documents.passes):
                    at = [i for i, d in enumerate(batch.documents) if d.inform == number]
                    if at:
                        batch.places.append(at)
                        tally = None
                        if source_passes.documents.inform.on_error == "skip":
                            tally = batch.skipped.setdefault(number, Tally())
                        yield EncodingJob(
                            [batch.documents[i].example for i in at], source_passes.label, tally
                        )

        width = len(self._encoder.schema.columns)
        for encoded in self._encoding.map(jobs()):
            batch = reading[0]
            batch.fill(batch.places.pop(0), encoded, width)
            if None not in batch.sequences:
                yield reading.popleft()
        yield from reading  # an epoch may end without another document

    def _read(self) -> Iterator[_Batch]:
        """Yield documents from the current position, at most as many as a window has."""
        remaining_documents, over = self._size, False
        width = len(self._encoder.schema.columns)
        while remaining_documents and not over:
            documents: list[Drawn] = []
            while len(documents) < min(_ENCODED, remaining_documents):
                document = self._documents.next()
                if document is None:
                    over = True
                    break
                documents.append(document)
            remaining_documents -= len(documents)
            empty: list[SequenceArrays | None] = [None] * (len(documents) * width)
            yield _Batch(documents, over, self._documents.mark(), empty)
