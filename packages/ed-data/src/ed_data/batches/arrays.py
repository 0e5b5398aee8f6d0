"""Rows to arrays: the batch that trainers take (`input_ids`, `labels`, `segment_ids`, …)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ed_data.order.mixing import IntArray
from ed_data.order.plan import Rows
from ed_data.schema import NO_VALUE, Value

Batch = dict[str, NDArray[Any]]
IGNORED = -100


@dataclass(frozen=True)
class Layout:
    """The arrays of a batch.

    Attributes:
        batch_size: b.
        seq_length: s.
        pad_id: `input_ids` where there is no token.
        columns: names of the columns of a document; see `ed_data.schema.Column.name`.
        values: the numbers beside the tokens.
        width_multiple: None for s columns of an array; else as many as the longest row needs,
            rounded up.
        attention_mask: add it (1 on tokens).
    """

    batch_size: int
    seq_length: int
    pad_id: int
    columns: tuple[str, ...] = ("",)
    values: tuple[Value, ...] = ()
    width_multiple: int | None = None
    attention_mask: bool = False


def make_batch(rows: Rows, layout: Layout, only: Sequence[int] | None = None) -> Batch:
    """Fill the arrays of a batch from planned rows, without a loop over tokens or pieces.

    Fewer rows than `batch_size` leave empty ones.

    Args:
        rows: of the whole batch.
        layout: of the whole batch.
        only: rows to make, in this order; the tokens of the others are not read. None makes all.

    Returns:
        int32 arrays [b, s] for each column: `input_ids`; `labels`, unshifted, -100 on padding and
        where the loss is masked; `segment_ids`, 0 on padding, 1… within a row, the same for all
        columns of a document; `position_ids`, from 0 in each segment. Each value of the schema is
        a float32 array [b, s].
    """
    counts = [_lengths(rows, column, len(layout.columns)) for column in range(len(layout.columns))]
    width = layout.seq_length
    if layout.width_multiple is not None and len(rows.row):
        longest = int(max(_per_row(rows, count).max() for count in counts))
        width = min(-(-longest // layout.width_multiple) * layout.width_multiple, width)
    if only is not None:
        rows, layout, chosen = _chosen(rows, layout, only)
        counts = [count[chosen] for count in counts]
    batch: Batch = {}
    for column, (name, count) in enumerate(zip(layout.columns, counts, strict=True)):
        arrays = _column(rows, layout, column, count, width)
        for value in layout.values:
            if value.column == name:
                batch[value.name] = arrays.pop(value.name)
        batch.update({f"{name}_{key}" if name else key: values for key, values in arrays.items()})
    return batch


def _chosen(rows: Rows, layout: Layout, only: Sequence[int]) -> tuple[Rows, Layout, IntArray]:
    """Some rows alone, and the numbers of their pieces."""
    place = np.full(layout.batch_size, -1, np.int64)
    place[list(only)] = np.arange(len(only))
    to = place[rows.row]
    pieces = np.flatnonzero(to >= 0)
    pieces = pieces[np.argsort(to[pieces], kind="stable")]
    few = Rows(
        rows.tokens,
        rows.source[pieces],
        rows.document[pieces],
        rows.start[pieces],
        rows.length[pieces],
        to[pieces],
        rows.segment[pieces],
    )
    return few, replace(layout, batch_size=len(only)), pieces


def _lengths(rows: Rows, column: int, columns: int) -> IntArray:
    """Tokens of each piece in a column: a piece is as long as the longest of its columns."""
    if columns == 1:
        return rows.length
    lengths = np.empty_like(rows.length)
    for i, tokens in enumerate(rows.tokens):
        here = rows.source == i
        lengths[here] = tokens.lengths(rows.document[here], column)
    return np.clip(lengths - rows.start, 0, rows.length)


def _per_row(rows: Rows, count: IntArray) -> IntArray:
    return np.bincount(rows.row, count).astype(np.int64)


def _column(rows: Rows, layout: Layout, column: int, count: IntArray, width: int) -> Batch:
    ends = np.cumsum(count)
    used = _per_row(rows, count)
    before = np.cumsum(used) - used  # tokens in the rows before each row
    within = np.arange(int(count.sum())) - np.repeat(ends - count, count)
    place = np.repeat(rows.row, count) * width
    place += np.repeat(ends - count - before[rows.row], count) + within
    shape = (layout.batch_size, width)
    batch: Batch = {
        "input_ids": np.full(shape, layout.pad_id, np.int32),
        "labels": np.full(shape, IGNORED, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "position_ids": np.zeros(shape, np.int32),
    }
    own = [(n, v) for n, v in enumerate(layout.values) if v.column == layout.columns[column]]
    batch.update((value.name, np.full(shape, NO_VALUE, np.float32)) for _, value in own)
    batch["segment_ids"].reshape(-1)[place] = np.repeat(rows.segment, count)
    batch["position_ids"].reshape(-1)[place] = within
    for i, tokens in enumerate(rows.tokens):
        here = rows.source == i
        if not here.any():
            continue
        ids, mask = tokens.gather(rows.document[here], rows.start[here], count[here], column)
        at = place[np.repeat(here, count)]
        batch["input_ids"].reshape(-1)[at] = ids
        batch["labels"].reshape(-1)[at] = ids if mask is None else np.where(mask, ids, IGNORED)
        for number, value in own:
            found = tokens.values(rows.document[here], rows.start[here], count[here], column)
            batch[value.name].reshape(-1)[at] = found[:, number]
    if layout.attention_mask:
        batch["attention_mask"] = (batch["segment_ids"] > 0).astype(np.int32)
    return batch
