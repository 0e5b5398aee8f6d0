"""Rows to arrays: the batch that trainers take (`input_ids`, `labels`, `segment_ids`, …)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ed_data.plan import Window
from ed_data.store import Tokens

Batch = dict[str, NDArray[np.int32]]
IGNORED = -100


def make_batch(
    rows: Sequence[tuple[Window, int]],
    stores: Sequence[Tokens],
    *,
    batch_size: int,
    seq_length: int,
    pad_id: int,
    width_multiple: int | None = None,
    attention_mask: bool = False,
) -> Batch:
    """Fill the arrays of a batch from planned rows, without a loop over tokens or pieces.

    Args:
        rows: (window, row of the window) of each row; fewer than `batch_size` leave empty rows.
        stores: per inform, its tokens.
        batch_size: b.
        seq_length: s.
        pad_id: `input_ids` where there is no token.
        width_multiple: None for s columns; else as many as the longest row needs, rounded up.
        attention_mask: add it (1 on tokens).

    Returns:
        int32 arrays [b, s]: `input_ids`; `labels`, unshifted, -100 on padding and where the loss
        is masked; `segment_ids`, 0 on padding, 1… within a row; `position_ids`, from 0 in each
        segment.
    """
    inform, document, start, count, row_of, segment = _pieces(rows)
    ends = np.cumsum(count)
    used = np.zeros(len(rows), np.int64)  # tokens of each row
    np.add.at(used, row_of, count)
    before = np.cumsum(used) - used
    width = seq_length
    if width_multiple is not None and len(rows):
        longest = int(used.max())
        width = min(-(-longest // width_multiple) * width_multiple, seq_length)

    within = np.arange(int(count.sum())) - np.repeat(ends - count, count)
    column = np.repeat(ends - count - before[row_of], count) + within
    place = np.repeat(row_of, count) * width + column
    shape = (batch_size, width)
    result = {
        "input_ids": np.full(shape, pad_id, np.int32),
        "labels": np.full(shape, IGNORED, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "position_ids": np.zeros(shape, np.int32),
    }
    result["segment_ids"].reshape(-1)[place] = np.repeat(segment, count)
    result["position_ids"].reshape(-1)[place] = within
    for i, store in enumerate(stores):
        here = inform == i
        if not here.any():
            continue
        tokens, mask = store.gather(document[here], start[here], count[here])
        at = place[np.repeat(here, count)]
        result["input_ids"].reshape(-1)[at] = tokens
        labels = tokens if mask is None else np.where(mask, tokens, IGNORED)
        result["labels"].reshape(-1)[at] = labels
    if attention_mask:
        result["attention_mask"] = (result["segment_ids"] > 0).astype(np.int32)
    return result


def _pieces(rows: Sequence[tuple[Window, int]]) -> tuple[NDArray[np.int64], ...]:
    """Inform, document, start, count, row and segment number of each piece, row after row."""
    columns: list[list[NDArray[np.int64]]] = [[] for _ in range(6)]
    for number, (window, row) in enumerate(rows):
        packing = window.packing
        part = slice(packing.row_offsets[row], packing.row_offsets[row + 1])
        which = packing.document[part]
        size = len(which)
        values = (
            window.inform[which],
            window.document[which],
            packing.start[part],
            packing.length[part],
            np.full(size, number, np.int64),
            np.arange(1, size + 1),
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return tuple(np.concatenate(c) if c else np.empty(0, np.int64) for c in columns)
