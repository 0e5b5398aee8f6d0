"""From a row's number to the pieces of documents it holds, for every row of an endless stream.

An epoch's documents are cut into windows, each packed by itself: a window is a pure function of
(options, seed, epoch, window). How many rows each window gave is the index that finds a row; it
is kept beside the token cache, so that a resumed run need not pack what it has already seen.
"""

from __future__ import annotations

import os
import threading
import uuid
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ed_data.mixture import DocumentOrder
from ed_data.packing import Packing, pack, split_pieces
from ed_data.shuffle import permutation
from ed_data.store import Tokens

IntArray = NDArray[np.int64]
#: Documents that are packed together. Large enough that best-fit leaves no gap worth speaking of,
#: small enough that the first batch does not wait.
WINDOW = 16_384
_ROWS = 3  # names a use of the seed, as in mixture
_KEPT = 4  # windows in memory


@dataclass(frozen=True)
class RowOptions:
    """How documents become rows.

    Attributes:
        seq_length: tokens that a row can hold.
        strategy: a packing strategy, or None for one document (or piece of one) per row.
        max_length: documents are cut at it; None cuts nothing.
        shuffle_rows: rows that change places with each other; None keeps their order.
        seed: orders the rows.
    """

    seq_length: int
    strategy: str | None
    max_length: int | None
    shuffle_rows: int | None
    seed: int


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
        order: the documents.
        tokens: per inform, the numbers of those of its documents that belong to this split.
        stores: per inform, its tokens.
        options: how documents become rows.
        index_folder: where row counts are kept, or None to keep them in memory and to pack each
            window only when it is reached.
    """

    def __init__(
        self,
        order: DocumentOrder,
        members: Sequence[IntArray],
        stores: Sequence[Tokens],
        options: RowOptions,
        index_folder: str | os.PathLike[str] | None,
    ) -> None:
        self._order, self._members, self._stores = order, members, stores
        self._options = options
        self._folder = None if index_folder is None else Path(index_folder)
        self.windows_per_epoch = -(-order.epoch_size // WINDOW)
        # Rows before each window that has been counted, from (epoch 0, window 0) on.
        self._ends: list[int] = []
        self._totals: list[tuple[int, int]] = []  # tokens placed, tokens dropped
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._lock = threading.RLock()

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

    def _make(self, number: int) -> Window:
        epoch, place = divmod(number, self.windows_per_epoch)
        inform, index = self._order.take(epoch, place * WINDOW, (place + 1) * WINDOW)
        document = np.empty_like(index)
        lengths = np.empty_like(index)
        for i, (members, store) in enumerate(zip(self._members, self._stores, strict=True)):
            here = inform == i
            document[here] = members[index[here]]
            lengths[here] = store.lengths(document[here])
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
            if self._folder is not None and place == 0:
                for row in self._epoch_index(epoch):
                    self._extend(*row)
                continue
            self._extend(*self._measure(len(self._ends)))

    def _extend(self, rows: int, placed: int, dropped: int) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + rows)
        self._totals.append((placed, dropped))

    def _measure(self, number: int) -> tuple[int, int, int]:
        window = self.window(number)
        return window.packing.rows, window.packing.tokens, window.dropped

    def _epoch_index(self, epoch: int) -> list[list[int]]:
        assert self._folder is not None
        path = self._folder / f"rows-{epoch}.bin"
        try:
            # Not numpy.load: see the note in store.py.
            found = np.fromfile(path, np.int64)
        except OSError:
            found = np.empty(0, np.int64)
        if len(found) == 3 * self.windows_per_epoch:
            return found.reshape(-1, 3).tolist()
        first = epoch * self.windows_per_epoch
        index = [self._measure(first + place) for place in range(self.windows_per_epoch)]
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        np.array(index, np.int64).tofile(part)
        os.replace(part, path)
        return [list(row) for row in index]


def one_per_row(lengths: IntArray, capacity: int) -> Packing:
    """The plan without packing: each document on a row of its own, longer ones on several."""
    document, start, length = split_pieces(lengths, capacity)
    return Packing(np.arange(len(document) + 1), document, start, length)
