"""Windows: documents that are packed together, and the rows of a batch taken from them.

An order of rows is a sequence of windows. It is *indexed* (`plan.py`) if each window can be
computed at any time, or *streamed* (`stream.py`) if the windows follow one another and a small
state contains the current position. Both kinds pack a window and select its rows in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.order.mixing import permutation
from ed_data.order.packing import Packing, pack, split_pieces
from ed_data.storage.store import StoredTokens
from ed_data.tokens.encoded import IntArray

_CHECKED = 64  # pieces that are searched for a label at a time


@dataclass(frozen=True)
class PlannedRows:
    """The pieces of documents in the rows of one batch, row after row.

    Attributes:
        tokens: sources of tokens.
        source: [pieces] index into `tokens`.
        document: [pieces] number of the document in its source.
        start: [pieces] first token.
        length: [pieces] number of tokens; a column with fewer tokens contributes all of its tokens.
        row: [pieces] row of the batch.
        segment: [pieces] number within the row, from 1.
    """

    tokens: Sequence[StoredTokens]
    source: IntArray
    document: IntArray
    start: IntArray
    length: IntArray
    row: IntArray
    segment: IntArray


class IndexedOrder(Protocol):
    """An order in which the rows of any step can be computed, in any sequence and by any thread.

    Attributes:
        steps_per_epoch: number of batches of the first epoch.
        stats: statistics of the first epoch, as JSON values.
        endless: whether epochs follow one another; otherwise there are `steps_per_epoch` steps.
    """

    endless: bool

    @property
    def steps_per_epoch(self) -> int: ...

    def count_steps(self, epochs: int) -> int: ...

    @property
    def stats(self) -> dict[str, Any]: ...

    def rows_at(self, step: int) -> PlannedRows:
        """Return the rows of a step."""
        ...

    def find_steps(self, digests: NDArray[np.uint64], stop: int) -> dict[int, list[int]]:
        """Return the steps before `stop` that have a place for documents, by their digests."""
        ...


class StreamedOrder(Protocol):
    """An order that is read sequentially, so that document lengths need not be known in advance.

    Attributes:
        stats: statistics of the rows read so far, as JSON values.
    """

    @property
    def stats(self) -> dict[str, Any]: ...

    def __next__(self) -> PlannedRows:
        """Return the rows of the next batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the current position, as JSON values of constant size."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state."""
        ...

    def close(self) -> None:
        """Stop background work."""
        ...


@dataclass(frozen=True)
class RowOptions:
    """How documents become rows, and rows become batches.

    Attributes:
        batch_size: rows of a batch.
        seq_length: maximum number of tokens of a row.
        strategy: packing strategy, or None for one document (or piece of a document) per row.
        max_length: number of tokens at which documents are truncated; None truncates nothing.
        cut: what happens to a longer document: its end (`right`) or its beginning (`left`) is
            removed, or the document is dropped (`drop`).
        shuffle_rows: number of rows that are shuffled together; None keeps their order.
        seed: seed of the row order.
        endless: epochs follow one another, and a batch may contain rows of two epochs. Otherwise
            the epoch is read once, and the last batch may have fewer rows.
    """

    batch_size: int
    seq_length: int
    strategy: str | None
    max_length: int | None
    shuffle_rows: int | None
    seed: int
    endless: bool
    cut: str = "right"


class CutDocuments(NamedTuple):
    """The documents of a window that are longer than allowed.

    Attributes:
        documents: number of documents of the window.
        longer: number of documents that are cut, dropped or split.
        unlearned: number of documents that have tokens with loss, but none after the cut.
    """

    documents: int
    longer: int
    unlearned: int


@dataclass(frozen=True)
class Window:
    """The packed rows of one window; `packing` indexes its documents.

    Attributes:
        tokens: sources of tokens.
        source: [documents] index into `tokens`.
        document: [documents] number of the document in its source.
        packing: the rows.
        truncated: number of tokens that `max_length` removed.
    """

    tokens: Sequence[StoredTokens]
    source: IntArray
    document: IntArray
    packing: Packing
    truncated: int

    @classmethod
    def pack_documents(
        cls,
        tokens: Sequence[StoredTokens],
        source: IntArray,
        document: IntArray,
        options: RowOptions,
        key: tuple[int, ...],
    ) -> Window:
        """Pack documents into rows.

        Args:
            tokens: see the attributes, as for `source` and `document`.
            source: see above.
            document: see above.
            options: how documents become rows.
            key: seed of the order of the rows.
        """
        lengths = np.empty_like(document)
        for i, source_tokens in enumerate(tokens):
            source_mask = source == i
            lengths[source_mask] = source_tokens.lengths(document[source_mask])
        truncated, skipped = 0, np.zeros_like(lengths)
        if options.max_length is not None:
            limited = np.minimum(lengths, options.max_length)
            if options.cut == "drop":
                limited = np.where(lengths > options.max_length, 0, lengths)
            if options.cut == "left":
                skipped = lengths - limited
            truncated = int((lengths - limited).sum())
            lengths = limited
        if options.strategy is None:
            packing = one_per_row(lengths, options.seq_length)
        else:
            packing = pack(lengths, options.seq_length, options.strategy)
        if skipped.any():
            packing = replace(packing, start=packing.start + skipped[packing.document])
        if options.shuffle_rows is not None:
            packing = packing.reorder_rows(
                permutation(packing.rows, *key, buffer=options.shuffle_rows)
            )
        return cls(tokens, source, document, packing, truncated)

    def check_labels(self) -> None:
        """Check that a token of the window has loss.

        Raises:
            DataError: no token has loss, so nothing would be learned.
        """
        if not self._has_labels():
            hint = (
                f"; truncation removed {self.truncated} tokens, possibly the answers"
                if self.truncated
                else ""
            )
            raise DataError(
                f"no token of the first {len(self.document)} documents has a loss, so nothing "
                "would be learned: with assistant_only_loss, chats need messages of the role "
                f"'assistant' that the chat template marks{hint}",
                ("tokenization", "assistant_only_loss"),
            )

    def _has_labels(self) -> bool:
        pieces = self.packing
        for i, source in enumerate(self.tokens):
            source_pieces = np.flatnonzero(self.source[pieces.document] == i)
            for at in range(0, len(source_pieces), _CHECKED):
                part = source_pieces[at : at + _CHECKED]
                document = self.document[pieces.document[part]]
                for column in range(source.columns):
                    lengths = source.lengths(document, column)
                    counts = np.clip(lengths - pieces.start[part], 0, pieces.length[part])
                    ids, mask = source.gather(document, pieces.start[part], counts, column)
                    if len(ids) and (mask is None or mask.any()):
                        return True
        return False


def count_cuts(
    tokens: Sequence[StoredTokens], source: IntArray, document: IntArray, options: RowOptions
) -> CutDocuments:
    """Count the documents that are longer than allowed; see `CutDocuments`.

    Only the longer documents are read. With several columns, a document is unlearned if one of its
    columns is.

    Args:
        tokens: sources of tokens.
        source: [documents] index into `tokens`.
        document: [documents] number of the document in its source.
        options: the limits.
    """
    limit = options.seq_length if options.max_length is None else options.max_length
    longer = unlearned = 0
    for i, source_tokens in enumerate(tokens):
        numbers = document[source == i]
        long = numbers[source_tokens.lengths(numbers) > limit]
        longer += len(long)
        if options.max_length is None or options.cut == "drop":
            continue
        for at in range(0, len(long), _CHECKED):
            part = long[at : at + _CHECKED]
            lost = np.zeros(len(part), bool)
            for column in range(source_tokens.columns):
                lost |= _lose_labels(
                    source_tokens, part, column, limit, cut_left=options.cut == "left"
                )
            unlearned += int(lost.sum())
    return CutDocuments(len(document), longer, unlearned)


def _lose_labels(
    source: StoredTokens, document: IntArray, column: int, limit: int, *, cut_left: bool
) -> NDArray[np.bool_]:
    """Return for each document whether it has tokens with loss only in the part that is removed."""
    lengths = source.lengths(document, column)
    _, mask = source.gather(document, np.zeros_like(lengths), lengths, column)
    if mask is None:
        return np.zeros(len(document), bool)
    ends = np.cumsum(lengths)
    lost = np.zeros(len(document), bool)
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        labels = mask[end - length : end]
        remaining = labels[-limit:] if cut_left else labels[:limit]
        lost[number] = bool(labels.any()) and not remaining.any()
    return lost


def one_per_row(lengths: IntArray, capacity: int) -> Packing:
    """Plan rows without packing: each document has its own row; longer documents have several."""
    document, start, length = split_pieces(lengths, capacity)
    return Packing(np.arange(len(document) + 1), document, start, length)


def plan_rows(parts: Iterable[tuple[Window, int, int]]) -> PlannedRows:
    """Return the rows of a batch.

    Args:
        parts: windows, and the first row and the number of rows to select from each.
    """
    tokens: list[StoredTokens] = []
    pieces, number = [np.empty((6, 0), np.int64)], 0
    for window, first, count in parts:
        packing = window.packing
        part = slice(packing.row_offsets[first], packing.row_offsets[first + count])
        counts = np.diff(packing.row_offsets[first : first + count + 1])
        which = packing.document[part]
        values = (
            window.source[which] + len(tokens),
            window.document[which],
            packing.start[part],
            packing.length[part],
            np.repeat(np.arange(number, number + count), counts),
            np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + 1,
        )
        pieces.append(np.stack(values))
        tokens += window.tokens
        number += count
    return PlannedRows(tokens, *np.concatenate(pieces, axis=1))


def drop_pieces(rows: PlannedRows, is_dropped: NDArray[np.bool_]) -> PlannedRows:
    """Return the rows of a batch without some of their pieces; a row may become empty.

    The later pieces of a row move up, so that padding remains at the end of the row.

    Args:
        rows: the rows.
        is_dropped: [pieces] True for the pieces to omit.
    """
    kept = np.flatnonzero(~is_dropped)
    counts = np.bincount(rows.row[kept])
    segment = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return PlannedRows(
        rows.tokens,
        rows.source[kept],
        rows.document[kept],
        rows.start[kept],
        rows.length[kept],
        rows.row[kept],
        segment,
    )
