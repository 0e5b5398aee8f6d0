"""Orders: which pieces of which documents make up the rows of each batch.

An order is *indexed*, when the rows of any step can be asked for at any time, or *streamed*, when
batches come one after the other and a small state says where the stream is.

`RowPlan` is the indexed order over documents whose lengths are known. The documents of an epoch are
cut into windows, each packed by itself: a window is a pure function of (options, seed, epoch,
window). The index that finds a row is the number of rows of each window; it is kept beside the
token cache, so that a resumed run need not pack again the windows behind it.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ed_data.cache import new_file, remove_abandoned
from ed_data.errors import DataError
from ed_data.order.mixing import DocumentOrder, IntArray, permutation
from ed_data.order.packing import Packing, pack, split_pieces
from ed_data.storage.store import Part, Tokens

log = logging.getLogger("ed_data")
#: Documents that are packed together: enough for best-fit to leave hardly a gap, and few enough for
#: the first batch to come soon.
WINDOW = 16_384
_ROWS = 3  # names a use of the seed, as in mixture
_KEPT = 4  # windows in memory
_LOOKED_AT = 64  # pieces among which a label is looked for at a time


@dataclass(frozen=True)
class Rows:
    """The pieces of documents in the rows of one batch, row after row.

    Attributes:
        tokens: sources of tokens.
        source: [pieces] index into `tokens`.
        document: [pieces] number of the document there.
        start: [pieces] first token.
        length: [pieces] number of tokens; a column of fewer tokens gives all that it has.
        row: [pieces] row of the batch.
        segment: [pieces] number within the row, from 1.
    """

    tokens: Sequence[Tokens]
    source: IntArray
    document: IntArray
    start: IntArray
    length: IntArray
    row: IntArray
    segment: IntArray


class IndexedOrder(Protocol):
    """An order in which the step says everything: it may be asked in any order, by any thread.

    Attributes:
        steps_per_epoch: batches of the first epoch.
        stats: figures of the first epoch, as JSON values.
        endless: whether epoch follows epoch; else there are `steps_per_epoch` steps.
    """

    endless: bool

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def stats(self) -> dict[str, Any]: ...

    def rows_at(self, step: int) -> Rows:
        """Return the rows of a step."""
        ...


class StreamedOrder(Protocol):
    """An order that is read from the front: lengths need not be known ahead.

    Attributes:
        stats: figures of what has been read, as JSON values.
    """

    @property
    def stats(self) -> dict[str, Any]: ...

    def __next__(self) -> Rows:
        """Return the rows of the next batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is, as JSON values: small, whatever has been read."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        ...

    def close(self) -> None:
        """Stop whatever goes on beside the reading."""
        ...


@dataclass(frozen=True)
class RowOptions:
    """How documents become rows, and rows batches.

    Attributes:
        batch_size: rows of a batch.
        seq_length: tokens that a row can hold.
        strategy: a packing strategy, or None for one document (or piece of one) per row.
        max_length: documents are cut at it; None cuts nothing.
        shuffle_rows: rows that change places with each other; None keeps their order.
        seed: orders the rows.
        endless: epoch follows epoch, and a batch may hold rows of two; else the epoch is read once,
            and the last batch may have fewer rows.
    """

    batch_size: int
    seq_length: int
    strategy: str | None
    max_length: int | None
    shuffle_rows: int | None
    seed: int
    endless: bool


@dataclass(frozen=True)
class Window:
    """The packed rows of one window of an epoch: `packing` indexes these documents.

    Attributes:
        inform: [documents] index of the inform of each.
        document: [documents] its number in the inform.
        packing: the rows.
        dropped: tokens that `max_length` cut off.
    """

    inform: IntArray
    document: IntArray
    packing: Packing
    dropped: int


class RowPlan:
    """The rows of all epochs, one after the other.

    Args:
        order: the documents: informs are indices of `parts`, numbers are of their `members`.
        parts: the documents of each inform.
        options: how documents become rows.
        index_folder: where row counts are kept, or None to keep them in memory and to pack each
            window only when it is reached, as while a store is being written.
    """

    def __init__(
        self,
        order: DocumentOrder,
        parts: Sequence[Part],
        options: RowOptions,
        index_folder: str | os.PathLike[str] | None,
    ) -> None:
        self._order, self._parts, self._options = order, parts, options
        self.tokens = [part.tokens for part in parts]
        self.endless = options.endless
        self._folder = None if index_folder is None else Path(index_folder)
        self.windows_per_epoch = -(-order.epoch_size // WINDOW)
        # Rows before each window that has been counted, from (epoch 0, window 0) on.
        self._ends: list[int] = []
        self._totals: list[tuple[int, int]] = []  # tokens placed, tokens dropped
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._lock = threading.RLock()
        order.follow(WINDOW, self._first_step)

    def rows_at(self, step: int) -> Rows:
        """Return the rows of a step."""
        first = step * self._options.batch_size
        stop = first + self._options.batch_size
        if not self.endless:
            stop = min(stop, self.rows_in_epoch(0))
        pieces = [np.empty((6, 0), np.int64)]
        for number, row in enumerate(range(first, stop)):
            at, place = self.locate(row)
            window = self.window(at)
            packing = window.packing
            part = slice(packing.row_offsets[place], packing.row_offsets[place + 1])
            which = packing.document[part]
            values = (
                window.inform[which],
                window.document[which],
                packing.start[part],
                packing.length[part],
                np.full(len(which), number, np.int64),
                np.arange(1, len(which) + 1),
            )
            pieces.append(np.stack(values))
        return Rows(self.tokens, *np.concatenate(pieces, axis=1))

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the first epoch: full ones where epochs follow it, all otherwise."""
        rows, size = self.rows_in_epoch(0), self._options.batch_size
        return max(rows // size, 1) if self.endless else -(-rows // size)

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of the first epoch.

        `documents`, `rows`, `tokens` (placed; of several columns, the longest), `tokens_cut` (by a
        length limit), `fill` (share of the positions that hold a token), `steps_per_epoch`, and per
        source its `documents` in all and in the epoch, and how many rows were `dropped`, by reason.
        """
        rows = self.rows_in_epoch(0)
        placed, dropped = self.epoch_tokens(0)
        drawn = self._order.documents_per_epoch()
        return {
            "documents": sum(drawn),
            "rows": rows,
            "tokens": placed,
            "tokens_cut": dropped,
            "fill": placed / max(rows * self._options.seq_length, 1),
            "steps_per_epoch": self.steps_per_epoch,
            "sources": {
                part.label: {"documents": len(part.members), "per_epoch": count, **_dropped(part)}
                for part, count in zip(self._parts, drawn, strict=True)
            },
        }

    def rows_in_epoch(self, epoch: int) -> int:
        """Number of rows of an epoch; epochs differ a little where packing is not exact."""
        first, last = epoch * self.windows_per_epoch, (epoch + 1) * self.windows_per_epoch
        with self._lock:
            self._count(last - 1)
            return self._ends[last - 1] - (self._ends[first - 1] if first else 0)

    def epoch_tokens(self, epoch: int) -> tuple[int, int]:
        """Tokens that an epoch's rows hold, and tokens that `max_length` cut off."""
        self.rows_in_epoch(epoch)
        part = self._totals[epoch * self.windows_per_epoch : (epoch + 1) * self.windows_per_epoch]
        return sum(placed for placed, _ in part), sum(dropped for _, dropped in part)

    def locate(self, row: int) -> tuple[int, int]:
        """Return the number of the window (counted over all epochs) and the row in it."""
        with self._lock:
            while not self._ends or self._ends[-1] <= row:
                self._count(len(self._ends))
            number = bisect_right(self._ends, row)
            return number, row - (self._ends[number - 1] if number else 0)

    def window(self, number: int) -> Window:
        """Return a window, counted over all epochs; the last few are kept in memory."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
            window = self._kept[number] = self._make(number)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return window

    def _first_step(self, number: int) -> int:
        """The step in which a window begins, whose predecessors have been counted."""
        return (self._ends[number - 1] if number else 0) // self._options.batch_size

    def check_labels(self) -> None:
        """Look for a token with loss in the first window.

        Raises:
            DataError: there is none, so that nothing would be learned.
        """
        window = self.window(0)
        if not has_labels(self.tokens, window):
            raise no_labels(len(window.document), window.dropped)

    def _make(self, number: int) -> Window:
        epoch, place = divmod(number, self.windows_per_epoch)
        inform, index = self._order.take(epoch, place * WINDOW, (place + 1) * WINDOW)
        document = np.empty_like(index)
        lengths = np.empty_like(index)
        for i, part in enumerate(self._parts):
            here = inform == i
            document[here] = part.members[index[here]]
            lengths[here] = part.tokens.lengths(document[here])
        options, dropped = self._options, 0
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
                permutation(
                    packing.rows, _ROWS, options.seed, epoch, place, buffer=options.shuffle_rows
                )
            )
        return Window(inform, document, packing, dropped)

    def _count(self, number: int) -> None:
        """Extend the index to a window: by its whole epoch from disk, or window by window."""
        while len(self._ends) <= number:
            epoch, place = divmod(len(self._ends), self.windows_per_epoch)
            complete = all(tokens.complete for tokens in self.tokens)
            if self._folder is not None and place == 0 and complete:
                self._count_epoch(self._folder, epoch)
            else:
                self._extend(*self._measure(len(self._ends)))

    def _extend(self, rows: int, placed: int, dropped: int) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + rows)
        self._totals.append((placed, dropped))

    def _measure(self, number: int) -> tuple[int, int, int]:
        window = self.window(number)
        return window.packing.rows, window.packing.tokens, window.dropped

    def _count_epoch(self, folder: Path, epoch: int) -> None:
        path = folder / f"rows-{epoch}.bin"
        try:
            # Not numpy.load: see the note in store.py.
            kept = np.fromfile(path, np.int64)
        except OSError:
            kept = np.empty(0, np.int64)
        if len(kept) == 3 * self.windows_per_epoch:
            for row in kept.reshape(-1, 3).tolist():
                self._extend(*row)
            return
        index = list[tuple[int, int, int]]()
        for _ in range(self.windows_per_epoch):
            index.append(self._measure(len(self._ends)))
            self._extend(*index[-1])
        remove_abandoned(folder)
        try:
            with new_file(path) as part:
                np.array(index, np.int64).tofile(part)
        except DataError as error:  # a cache that is only read, shared by many, has the tokens
            log.warning("the plan of the rows is not kept: %s", error)


def one_per_row(lengths: IntArray, capacity: int) -> Packing:
    """The plan without packing: each document on a row of its own, longer ones on several."""
    document, start, length = split_pieces(lengths, capacity)
    return Packing(np.arange(len(document) + 1), document, start, length)


def _dropped(part: Part) -> dict[str, Any]:
    dropped = part.tokens.tally.dropped
    return {"dropped": dict(dropped)} if dropped else {}


def has_labels(tokens: Sequence[Tokens], window: Window) -> bool:
    """Whether any piece of a window has a token with loss, in any column."""
    pieces = window.packing
    for i, source in enumerate(tokens):
        here = np.flatnonzero(window.inform[pieces.document] == i)
        for at in range(0, len(here), _LOOKED_AT):
            part = here[at : at + _LOOKED_AT]
            document = window.document[pieces.document[part]]
            for column in range(source.columns):
                lengths = source.lengths(document, column)
                counts = np.clip(lengths - pieces.start[part], 0, pieces.length[part])
                ids, mask = source.gather(document, pieces.start[part], counts, column)
                if len(ids) and (mask is None or mask.any()):
                    return True
    return False


def no_labels(documents: int, cut: int) -> DataError:
    """The error of a window in which nothing has loss."""
    why = f"; a length limit cut off {cut} tokens, the answers perhaps among them" if cut else ""
    return DataError(
        f"no token of the first {documents} documents has a loss, so nothing would be learned: "
        "with assistant_only_loss, chats need messages of the role 'assistant' that the chat "
        f"template marks{why}",
        ("tokenization", "assistant_only_loss"),
    )
