"""Packing: index plans of the pieces of documents that share a row.

All strategies depend only on the document lengths, are deterministic, and need memory and time
linear in the number of documents.

- `bfd`: best-fit decreasing (Johnson 1974). Documents of equal length are placed together, so the
  Python loop runs over distinct lengths, not over documents.
- `first_fit`: each document, in order, is placed in the first row with enough free tokens.
- `greedy`: rows are filled in order; a document that does not fit starts the next row.
- `wrapped`: the concatenated documents are divided into rows, at any token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ed_data.errors import DataError, did_you_mean
from ed_data.tokens.encoded import IntArray

_ALIKE = 20  # rows per length, on average, from which equal rows are processed together
_ENTRY = 2**40 - 1  # mask of the number of an entry
_OPEN = 256  # rows that first-fit searches before it discards full rows


@dataclass(frozen=True)
class Packing:
    """Rows of pieces of documents; each piece is a segment.

    Attributes:
        row_offsets: [rows + 1]; the pieces of row r are `row_offsets[r]` to `row_offsets[r + 1]`.
        document: [pieces] index of the document.
        start: [pieces] first token of the piece in its document.
        length: [pieces] number of tokens, at least 1.
    """

    row_offsets: IntArray
    document: IntArray
    start: IntArray
    length: IntArray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of placed tokens."""
        return int(self.length.sum())

    def reorder_rows(self, order: IntArray) -> Packing:
        """Return the plan in which row i is the former row `order[i]`."""
        counts = np.diff(self.row_offsets)[order]
        first = np.repeat(self.row_offsets[:-1][order] - (np.cumsum(counts) - counts), counts)
        pieces = first + np.arange(len(first))
        return Packing(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
            self.document[pieces],
            self.start[pieces],
            self.length[pieces],
        )


def pack(
    lengths: IntArray, capacity: int, strategy: str = "bfd", *, truncate: bool = False
) -> Packing:
    """Return a plan of rows with at most `capacity` tokens for documents of the given lengths.

    Rows are in the order of their first document, and the pieces of a row in document order.
    Documents without tokens are omitted.

    Args:
        lengths: [documents] number of tokens.
        capacity: maximum number of tokens of a row.
        strategy: `bfd`, `first_fit`, `greedy` or `wrapped`.
        truncate: truncate documents at `capacity` instead of splitting them into pieces.

    Raises:
        DataError: the strategy is unknown, or the capacity is less than 1.
    """
    if capacity < 1:
        raise DataError(f"the sequence length {capacity} is invalid: it must be at least 1")
    lengths = np.asarray(lengths, np.int64)
    if truncate:
        lengths = np.minimum(lengths, capacity)
    if strategy == "wrapped":
        document, start, length, row = _pack_wrapped(lengths, capacity)
    elif strategy in _BINS:
        document, start, length = split_pieces(lengths, capacity)
        row = _BINS[strategy](length, capacity)
    else:
        raise DataError(
            f"unknown packing strategy {strategy!r}{did_you_mean(strategy, STRATEGIES)} "
            f"(known: {', '.join(STRATEGIES)})"
        )
    # Number the rows by their first piece, then group the pieces of each row.
    counts = np.bincount(row)
    first = np.empty(len(counts), np.int64)
    first[row[::-1]] = np.arange(len(row))[::-1]  # the last write remains, which is the first piece
    by_first = np.argsort(first)
    rank = np.empty(len(first), np.int64)
    rank[by_first] = np.arange(len(first))
    order = _argsort_keys(rank[row], len(first))
    counts = counts[by_first]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return Packing(offsets, document[order], start[order], length[order])


def split_pieces(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray, IntArray]:
    """Split documents longer than `capacity` into pieces of that length and a remainder.

    Returns:
        Document, start and length of each piece, in document order.
    """
    pieces = -(-lengths // capacity)  # 0 for an empty document
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * capacity
    return document, start, np.minimum(lengths[document] - start, capacity)


def _argsort_keys(keys: IntArray, limit: int) -> IntArray:
    """Return the stable order of keys from 0 to `limit`; short integers sort faster."""
    return np.argsort(keys.astype(np.uint16) if limit < 2**16 else keys, kind="stable")


def _best_fit_decreasing(lengths: IntArray, capacity: int) -> IntArray:
    """Return the row of each piece: longest first, each in the fullest row with enough room."""
    counts = np.bincount(lengths)
    distinct = np.flatnonzero(counts)
    rows = -(-counts[distinct] // (capacity // distinct))
    if rows.sum() < _ALIKE * len(distinct):
        return best_fit_by_row(lengths, capacity)
    return best_fit_by_length(lengths, capacity)


def best_fit_by_row(lengths: IntArray, capacity: int) -> IntArray:
    """Best-fit decreasing, one row at a time: faster if few rows are equal.

    The fullest row with enough room receives as many pieces of one length as fit, because each
    piece makes the row fuller.
    """
    row = np.empty(len(lengths), np.int64)
    if not len(lengths):
        return row
    order = _argsort_keys(capacity - lengths, capacity)
    counts = np.bincount(lengths)
    distinct = np.flatnonzero(counts)
    shortest = int(distinct[0])  # rows with less room are discarded
    # Rows sorted by room, then by age, as integers room * 2^40 + number of the entry; `entry_rows`
    # maps entries to rows.
    rooms: list[int] = []
    entry_rows: list[int] = []
    opened = 0
    target_rows: list[int] = []
    pieces: list[int] = []  # placed in each of the chosen rows
    for length, count in zip(distinct[::-1].tolist(), counts[distinct][::-1].tolist(), strict=True):
        least, remaining_pieces = length << 40, count
        while remaining_pieces:
            at = bisect_left(rooms, least)
            if at < len(rooms):
                entry = rooms.pop(at)
                room, number = entry >> 40, entry_rows[entry & _ENTRY]
            else:
                room, number = capacity, opened
                opened += 1
            piece_count = min(room // length, remaining_pieces)
            remaining_pieces -= piece_count
            target_rows.append(number)
            pieces.append(piece_count)
            room -= piece_count * length
            if room >= shortest:
                insort(rooms, room << 40 | len(entry_rows))
                entry_rows.append(number)
    row[order] = np.repeat(target_rows, pieces)
    return row


def best_fit_by_length(lengths: IntArray, capacity: int) -> IntArray:
    """Best-fit decreasing, all pieces of one length at a time; the plan is the same.

    The fullest row with room r ≥ length receives r // length pieces, because each piece makes the
    row fuller, and rows with equal room are interchangeable.
    """
    row = np.empty(len(lengths), np.int64)
    order = _argsort_keys(capacity - lengths, capacity)
    distinct, counts = np.unique(lengths, return_counts=True)
    rooms: dict[int, list[IntArray]] = {}  # room left -> rows with that room
    present = 0  # bit r is set if rooms[r] is not empty, to find the least room in one step
    opened = offset = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        items = order[offset : offset + count]
        offset += count
        placed = 0
        while placed < count:
            fitting = present >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                rows = np.concatenate(rooms.pop(room))
                present &= ~(1 << room)
            else:
                room = capacity
                needed = -(-(count - placed) // (capacity // length))
                rows = np.arange(opened, opened + needed)
                opened += needed
            per_row = room // length
            remaining_pieces = count - placed
            full = min(len(rows), remaining_pieces // per_row)
            target_rows = np.repeat(rows[:full], per_row)
            last_count = remaining_pieces - len(target_rows) if full < len(rows) else 0
            present = _put(rooms, present, room - per_row * length, rows[:full])
            if last_count:
                target_rows = np.concatenate(
                    [target_rows, np.repeat(rows[full : full + 1], last_count)]
                )
                present = _put(rooms, present, room - last_count * length, rows[full : full + 1])
                full += 1
            present = _put(rooms, present, room, rows[full:])
            row[items[placed : placed + len(target_rows)]] = target_rows
            placed += len(target_rows)
    return row


def _put(rooms: dict[int, list[IntArray]], present: int, room: int, rows: IntArray) -> int:
    if len(rows) == 0 or room == 0:
        return present
    rooms.setdefault(room, []).append(rows)
    return present | (1 << room)


def _first_fit(lengths: IntArray, capacity: int) -> IntArray:
    """Return the row of each piece: the first row with enough room."""
    row = np.empty(len(lengths), np.int64)
    # The shortest of the remaining pieces; rows with less room are discarded.
    shortest = np.minimum.accumulate(lengths[::-1])[::-1]
    opened = used = 0  # rows opened; rows that are searched, at the front of the next two arrays
    room = np.zeros(_OPEN, np.int64)
    number = np.zeros(_OPEN, np.int64)
    for index, length in enumerate(lengths.tolist()):
        if length == capacity:
            row[index] = opened
            opened += 1
            continue
        fits = room[:used] >= length
        at = int(fits.argmax()) if used else 0
        if not (used and fits[at]):
            if used == len(room):
                keep = np.flatnonzero(room >= shortest[index])
                size = max(_OPEN, 2 * len(keep))
                room, number = np.resize(room[keep], size), np.resize(number[keep], size)
                used = len(keep)
            at = used
            room[at], number[at] = capacity, opened
            used += 1
            opened += 1
        room[at] -= length
        row[index] = number[at]
    return row


def _greedy(lengths: IntArray, capacity: int) -> IntArray:
    """Return the row of each piece: the current row, or the next if it does not fit (next-fit)."""
    ends = np.cumsum(lengths)
    starts: list[int] = []
    at, used, total = 0, 0, len(lengths)
    while at < total:
        starts.append(at)
        at = int(np.searchsorted(ends, used + capacity, side="right"))
        used = int(ends[at - 1])
    row = np.zeros(total, np.int64)
    row[starts[1:]] = 1
    return np.cumsum(row)


def _pack_wrapped(
    lengths: IntArray, capacity: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the pieces of the concatenated documents, split at ends of documents and rows."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.unique(np.concatenate([ends, np.arange(0, total + 1, capacity), [0, total]]))
    begin, length = cuts[:-1], np.diff(cuts)
    document = np.searchsorted(ends, begin, side="right")
    start = begin - (ends - lengths)[document]
    return document, start, length, begin // capacity


_BINS: dict[str, Callable[[IntArray, int], IntArray]] = {
    "bfd": _best_fit_decreasing,
    "first_fit": _first_fit,
    "greedy": _greedy,
}
STRATEGIES = (*_BINS, "wrapped")
