"""The indexed order: the rows of all epochs, of documents whose number is known.

The documents of an epoch are divided into windows, and each window is packed separately. A window
is a pure function of (options, seed, epoch, window). The index that finds a row contains the number
of rows of each window. It is stored next to the token cache, so that a resumed run does not pack
earlier windows again.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ed_data.cache import new_file, remove_abandoned
from ed_data.errors import DataError
from ed_data.order.mixing import DocumentOrder
from ed_data.order.windows import (
    PlannedRows,
    RowOptions,
    Window,
    count_cuts,
    drop_pieces,
    plan_rows,
)
from ed_data.storage.store import StorePart
from ed_data.tokens.encoded import IntArray

log = logging.getLogger("ed_data")
#: Documents that are packed together: enough for best-fit to fill rows almost completely, and few
#: enough for the first batch to be ready soon.
WINDOW = 16_384
_ROWS = 3  # identifies a use of the seed, as in mixing
_KEPT = 4  # windows in memory


class RowPlan:
    """The rows of all epochs, one epoch after another; see `windows.IndexedOrder`.

    Args:
        order: the documents: informs are indices of `parts`, numbers are indices of `members`.
        parts: the documents of each inform.
        options: how documents become rows.
        index_folder: folder of the row counts. None keeps them in memory and packs each window when
            it is reached, for example while a store is being written.
    """

    def __init__(
        self,
        order: DocumentOrder,
        parts: Sequence[StorePart],
        options: RowOptions,
        index_folder: str | os.PathLike[str] | None,
    ) -> None:
        self._order, self._parts, self._options = order, parts, options
        self.tokens = [part.tokens for part in parts]
        self.endless = options.endless
        self._folder = None if index_folder is None else Path(index_folder)
        self.windows_per_epoch = -(-order.epoch_size // WINDOW)
        # Rows up to the end of each window that has been counted, from (epoch 0, window 0) on.
        self._ends: list[int] = []
        self._totals: list[tuple[int, int]] = []  # tokens placed, tokens truncated
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._lock = threading.RLock()
        order.set_windows(WINDOW, self._first_step)

    def rows_at(self, step: int) -> PlannedRows:
        """Return the rows of a step."""
        first = step * self._options.batch_size
        stop = first + self._options.batch_size
        if not self.endless:
            stop = min(stop, self.rows_in_epoch(0))
        rows = plan_rows(self._iterate_parts(first, stop))
        if all(part.excluded is None for part in self._parts):
            return rows
        masks = [part.excluded for part in self._parts]
        return drop_pieces(rows, _select_pieces(rows.source, rows.document, masks))

    def find_steps(self, digests: NDArray[np.uint64], stop: int) -> dict[int, list[int]]:
        """Return the steps before `stop` whose batches have a place for documents.

        Args:
            digests: `Example.digest` of the documents.
            stop: number of steps to search.

        Returns:
            Digest -> ascending steps, from 0. The places of excluded documents count.

        Raises:
            DataError: the hashes of the documents are not stored.
        """
        stored = [_get_digests(part) for part in self._parts]
        masks = [np.isin(part_digests, digests) for part_digests in stored]
        steps: dict[int, set[int]] = {int(digest): set() for digest in digests}
        number = 0
        while self._first_step(number) < stop and (self.endless or number < self.windows_per_epoch):
            window = self.window(number)
            self._count(number)
            first_row, packing = (self._ends[number - 1] if number else 0), window.packing
            source, document = (
                places[packing.document] for places in (window.source, window.document)
            )
            pieces = np.flatnonzero(_select_pieces(source, document, masks))
            rows = np.searchsorted(packing.row_offsets, pieces, side="right") - 1 + first_row
            for piece, row in zip(pieces.tolist(), rows.tolist(), strict=True):
                step = row // self._options.batch_size
                if step < stop:
                    steps[int(stored[source[piece]][document[piece]])].add(step)
            number += 1
        return {digest: sorted(used) for digest, used in steps.items()}

    def _iterate_parts(self, row: int, stop: int) -> Iterator[tuple[Window, int, int]]:
        while row < stop:
            number, place = self.locate(row)
            window = self.window(number)
            count = min(stop - row, window.packing.rows - place)
            yield window, place, count
            row += count

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of the first epoch: full ones if epochs follow it, otherwise all."""
        rows, size = self.rows_in_epoch(0), self._options.batch_size
        return max(rows // size, 1) if self.endless else -(-rows // size)

    def count_steps(self, epochs: int) -> int:
        """Return the number of batches in which each row occurs `epochs` times.

        The last batch contains rows of the next epoch if the rows do not fill it.
        """
        return -(-self.rows_in_epoch(0) * epochs // self._options.batch_size)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the first epoch.

        `documents`, `rows`, `tokens` (placed; with several columns, of the longest), `tokens_cut`
        (by a length limit), `fill` (share of the positions that have a token), `steps_per_epoch`,
        and for each source the total number of `documents`, the documents `per_epoch`, and the
        number of `dropped` rows by reason.
        """
        rows = self.rows_in_epoch(0)
        placed, truncated = self.epoch_tokens(0)
        drawn = self._order.documents_per_epoch()
        return {
            "documents": sum(drawn),
            "rows": rows,
            "tokens": placed,
            "tokens_cut": truncated,
            "fill": placed / max(rows * self._options.seq_length, 1),
            "steps_per_epoch": self.steps_per_epoch,
            "sources": {
                part.label: {
                    "documents": len(part.members),
                    "per_epoch": count,
                    **_get_drop_counts(part),
                }
                for part, count in zip(self._parts, drawn, strict=True)
            },
        }

    def rows_in_epoch(self, epoch: int) -> int:
        """Return the number of rows of an epoch; epochs differ slightly if rows are not full."""
        first, last = epoch * self.windows_per_epoch, (epoch + 1) * self.windows_per_epoch
        with self._lock:
            self._count(last - 1)
            return self._ends[last - 1] - (self._ends[first - 1] if first else 0)

    def epoch_tokens(self, epoch: int) -> tuple[int, int]:
        """Return the number of tokens in an epoch's rows, and of tokens that were truncated."""
        self.rows_in_epoch(epoch)
        part = self._totals[epoch * self.windows_per_epoch : (epoch + 1) * self.windows_per_epoch]
        return sum(placed for placed, _ in part), sum(truncated for _, truncated in part)

    def locate(self, row: int) -> tuple[int, int]:
        """Return the number of the window (counted over all epochs) and the row in it."""
        with self._lock:
            while not self._ends or self._ends[-1] <= row:
                self._count(len(self._ends))
            number = bisect_right(self._ends, row)
            return number, row - (self._ends[number - 1] if number else 0)

    def window(self, number: int) -> Window:
        """Return a window, counted over all epochs; the most recent ones are kept in memory."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
            window = self._kept[number] = self._make(number)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return window

    def check_labels(self) -> None:
        """Check that a token of the first window has loss.

        Raises:
            DataError: no token has loss, so nothing would be learned.
        """
        self.window(0).check_labels()

    def report_cuts(self, level: int) -> None:
        """Log how many documents of the first window are cut, dropped or split.

        Args:
            level: level of the message about split documents.
        """
        options = self._options
        cuts = count_cuts(self.tokens, *self._select(0), options)
        if not cuts.longer:
            return
        limit = options.seq_length if options.max_length is None else options.max_length
        about = (
            f"{cuts.longer:,} of the first {cuts.documents:,} documents are longer than "
            f"{limit:,} tokens"
        )
        if options.max_length is None:
            if options.strategy != "wrapped":
                log.log(
                    level,
                    "%s and are split over several rows, so the later parts are learned without "
                    "their beginning; tokenization.truncation: drop, left or right avoids that",
                    about,
                )
            return
        effect = {"drop": "are dropped", "left": "lose their beginning"}.get(
            options.cut, "lose their end"
        )
        log.warning("%s and %s", about, effect)
        if cuts.unlearned:
            log.warning(
                "%s of these documents lose their whole answer, so nothing of them is learned: "
                "increase the sequence length, or set tokenization.truncation: drop or left",
                f"{cuts.unlearned:,}",
            )

    def _first_step(self, number: int) -> int:
        """Return the step in which a window begins; all earlier windows have been counted."""
        return (self._ends[number - 1] if number else 0) // self._options.batch_size

    def _select(self, number: int) -> tuple[IntArray, IntArray]:
        """Return the source and the number of each document of a window."""
        epoch, place = divmod(number, self.windows_per_epoch)
        source, index = self._order.take(epoch, place * WINDOW, (place + 1) * WINDOW)
        document = np.empty_like(index)
        for i, part in enumerate(self._parts):
            source_mask = source == i
            document[source_mask] = part.members[index[source_mask]]
        return source, document

    def _make(self, number: int) -> Window:
        source, document = self._select(number)
        epoch, place = divmod(number, self.windows_per_epoch)
        key = (_ROWS, self._options.seed, epoch, place)
        return Window.pack_documents(self.tokens, source, document, self._options, key)

    def _count(self, number: int) -> None:
        """Extend the index up to a window: by its whole epoch from disk, or window by window."""
        while len(self._ends) <= number:
            epoch, place = divmod(len(self._ends), self.windows_per_epoch)
            complete = all(tokens.complete for tokens in self.tokens)
            if self._folder is not None and place == 0 and complete:
                self._count_epoch(self._folder, epoch)
            else:
                self._extend(*self._measure(len(self._ends)))

    def _extend(self, rows: int, placed: int, truncated: int) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + rows)
        self._totals.append((placed, truncated))

    def _measure(self, number: int) -> tuple[int, int, int]:
        window = self.window(number)
        return window.packing.rows, window.packing.tokens, window.truncated

    def _count_epoch(self, folder: Path, epoch: int) -> None:
        path = folder / f"rows-{epoch}.bin"
        try:
            # numpy.load is avoided, see storage/store.py.
            stored_index = np.fromfile(path, np.int64)
        except OSError:
            stored_index = np.empty(0, np.int64)
        if len(stored_index) == 3 * self.windows_per_epoch:
            for row in stored_index.reshape(-1, 3).tolist():
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
        except DataError as error:  # the cache may be shared and read-only
            log.warning("the plan of the rows is not cached: %s", error)


def _select_pieces(
    source: IntArray, document: IntArray, masks: Sequence[NDArray[np.bool_] | None]
) -> NDArray[np.bool_]:
    """Return for each piece whether the mask [documents] of its source selects its document."""
    selected = np.zeros(len(document), bool)
    for i, mask in enumerate(masks):
        if mask is not None:
            # The rows of a batch may have the sources of several windows.
            pieces = source % len(masks) == i
            selected[pieces] = mask[document[pieces]]
    return selected


def _get_digests(part: StorePart) -> NDArray[np.uint64]:
    digests = part.tokens.digests if part.digests is None else part.digests
    if digests is None:
        raise DataError(
            f"the cached tokens of inform {part.label!r} have no hashes of documents, because an "
            "earlier version wrote them: set another mixture.cache_dir, or delete the folder"
        )
    return digests


def _get_drop_counts(part: StorePart) -> dict[str, Any]:
    dropped = part.tokens.tally.dropped
    return {"dropped": dict(dropped)} if dropped else {}
