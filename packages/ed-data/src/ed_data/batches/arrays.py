"""Planned rows to arrays: the batch that trainers receive (`input_ids`, `labels`, …)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ed_data.kinds.fields import NO_VALUE, Value
from ed_data.kinds.record import ANSWERS, KindOfRows
from ed_data.order.windows import PlannedRows
from ed_data.rows.example import RowAudio, RowMedium
from ed_data.tokens.audio import AudioEncoder
from ed_data.tokens.encoded import IntArray
from ed_data.tokens.items import MediumEncoder

NumpyBatch = dict[str, NDArray[Any]]
_IGNORED = -100


@dataclass(frozen=True)
class BatchLayout:
    """The arrays of a batch.

    Attributes:
        batch_size: number of rows b.
        seq_length: number of positions s.
        pad_id: `input_ids` of padding.
        columns: names of the columns of a document; see `ed_data.schema.Column.name`.
        values: numbers of the documents.
        width_multiple: None for s positions. Otherwise an array has as many positions as its
            longest row needs, rounded up to a multiple.
        attention_mask: add `attention_mask`, 1 for tokens.
        kind: the kind of the rows.
        decoder_start_token_id: first decoder token of each document, for encoder-decoders.
        media: computes the arrays of images or recordings of documents; None for batches without.
        audio: computes the features of recordings with transcripts; None for batches without.
    """

    batch_size: int
    seq_length: int
    pad_id: int
    columns: tuple[str, ...] = ("",)
    values: tuple[Value, ...] = ()
    width_multiple: int | None = None
    attention_mask: bool = False
    kind: KindOfRows = ANSWERS
    decoder_start_token_id: int | None = None
    media: MediumEncoder | None = None
    audio: AudioEncoder | None = None


def make_batch(
    rows: PlannedRows, layout: BatchLayout, only: Sequence[int] | None = None
) -> NumpyBatch:
    """Return the arrays of a batch, without a Python loop over tokens or pieces.

    If there are fewer rows than `batch_size`, the remaining rows are empty.

    Args:
        rows: rows of the whole batch.
        layout: layout of the whole batch.
        only: numbers of the rows to create, in this order; the tokens of other rows are not read.
            None creates all rows.

    Returns:
        int32 arrays [b, s] for each column: `input_ids`; `labels`, not shifted, -100 for padding
        and tokens without loss; `segment_ids`, 0 for padding and 1, 2, … within a row, equal for
        all columns of a document; `position_ids`, from 0 in each segment. Each value of the schema
        is a float32 array [b, s]. The task `seq2seq_lm` adds `decoder_input_ids` (the labels
        shifted right), `decoder_segment_ids`, `decoder_position_ids` and `labels` of the decoder.
        The tasks with one target for each row have `labels` [b], or `start_positions` and
        `end_positions` [b], and `token_classification` the classes of words. Pairs of texts have
        `token_type_ids` int32 [b, s]. With images, `pixel_values` [b, i, c, h, w] contains the
        images or tiles of each row, padded with zeros to the largest number of a row, which is
        rounded up; images of different sizes are packed patches, see `PatchEncoder.arrays`. With
        recordings in chats, `input_features` [b, i, m, f] contains their parts. The task
        `speech_seq2seq` has the arrays of the decoder, and `ctc` only `labels`; both have the
        features of `AudioEncoder.arrays`. The task `image_classification` has only `pixel_values`
        and `labels`, and `image_text` no labels.
    """
    counts = [_lengths(rows, column, len(layout.columns)) for column in range(len(layout.columns))]
    widths = [layout.seq_length] * len(counts)
    if layout.width_multiple is not None and len(rows.row):
        multiple = layout.width_multiple
        longest = [int(_per_row(rows, count).max()) for count in counts]
        if layout.kind.is_aligned:  # columns that are compared have one width
            longest = [max(longest)] * len(longest)
        widths = [min(-(-length // multiple) * multiple, layout.seq_length) for length in longest]
    size: tuple[int, ...] = ()
    if layout.media is not None:
        size = layout.media.width([*_media(rows).values()])
    samples = 0
    if layout.audio is not None:
        samples = layout.audio.width([*_recordings(rows).values()])
    if only is not None:
        rows, layout, pieces = _select_rows(rows, layout, only)
        counts = [count[pieces] for count in counts]
    batch: NumpyBatch = {}
    for column, (name, count) in enumerate(zip(layout.columns, counts, strict=True)):
        arrays = _column(rows, layout, column, count, widths[column])
        for value in layout.values:
            if value.column == name:
                batch[value.name] = arrays.pop(value.name)
        batch.update({f"{name}_{key}" if name else key: values for key, values in arrays.items()})
    batch = layout.kind.arrays(batch, layout.pad_id, layout.decoder_start_token_id)
    for value in layout.values:
        if value.token_types:
            batch[value.name] = np.maximum(batch[value.name], 0).astype(np.int32)
    if layout.media is not None:
        batch.update(layout.media.arrays(_media(rows), layout.batch_size, size))
        if layout.media.marks_prompts:
            for lead in (f"{name}_" if name else "" for name in layout.columns):
                labels, segments = batch[f"{lead}labels"], batch[f"{lead}segment_ids"]
                batch[f"{lead}token_type_ids"] = _after_prompt(labels, segments)
    if layout.audio is not None:
        batch.update(layout.audio.arrays(_recordings(rows), layout.batch_size, samples))
    return batch


def _select_rows(
    rows: PlannedRows, layout: BatchLayout, only: Sequence[int]
) -> tuple[PlannedRows, BatchLayout, IntArray]:
    """Return some rows, their layout, and the numbers of their pieces."""
    place = np.full(layout.batch_size, -1, np.int64)
    place[list(only)] = np.arange(len(only))
    to = place[rows.row]
    pieces = np.flatnonzero(to >= 0)
    pieces = pieces[np.argsort(to[pieces], kind="stable")]
    few = PlannedRows(
        rows.tokens,
        rows.source[pieces],
        rows.document[pieces],
        rows.start[pieces],
        rows.length[pieces],
        to[pieces],
        rows.segment[pieces],
    )
    return few, replace(layout, batch_size=len(only)), pieces


def _lengths(rows: PlannedRows, column: int, columns: int) -> IntArray:
    """Return the tokens of each piece in a column: a piece is as long as its longest column."""
    if columns == 1:
        return rows.length
    lengths = np.empty_like(rows.length)
    for i, tokens in enumerate(rows.tokens):
        source_mask = rows.source == i
        lengths[source_mask] = tokens.lengths(rows.document[source_mask], column)
    return np.clip(lengths - rows.start, 0, rows.length)


def _per_row(rows: PlannedRows, count: IntArray) -> IntArray:
    return np.bincount(rows.row, count).astype(np.int64)


def _column(
    rows: PlannedRows, layout: BatchLayout, column: int, count: IntArray, width: int
) -> NumpyBatch:
    ends = np.cumsum(count)
    used = _per_row(rows, count)
    row_starts = np.cumsum(used) - used  # tokens in the rows before each row
    within = np.arange(int(count.sum())) - np.repeat(ends - count, count)
    place = np.repeat(rows.row, count) * width
    place += np.repeat(ends - count - row_starts[rows.row], count) + within
    shape = (layout.batch_size, width)
    batch: NumpyBatch = {
        "input_ids": np.full(shape, layout.pad_id, np.int32),
        "labels": np.full(shape, _IGNORED, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "position_ids": np.zeros(shape, np.int32),
    }
    column_values = [
        (n, v) for n, v in enumerate(layout.values) if v.column == layout.columns[column]
    ]
    batch.update((value.name, np.full(shape, NO_VALUE, np.float32)) for _, value in column_values)
    batch["segment_ids"].reshape(-1)[place] = np.repeat(rows.segment, count)
    batch["position_ids"].reshape(-1)[place] = within
    for i, tokens in enumerate(rows.tokens):
        source_mask = rows.source == i
        if not source_mask.any():
            continue
        ids, mask = tokens.gather(
            rows.document[source_mask], rows.start[source_mask], count[source_mask], column
        )
        at = place[np.repeat(source_mask, count)]
        batch["input_ids"].reshape(-1)[at] = ids
        batch["labels"].reshape(-1)[at] = ids if mask is None else np.where(mask, ids, _IGNORED)
        for number, value in column_values:
            token_values = tokens.values(
                rows.document[source_mask], rows.start[source_mask], count[source_mask], column
            )
            batch[value.name].reshape(-1)[at] = token_values[:, number]
    if layout.attention_mask and layout.audio is None:
        batch["attention_mask"] = (batch["segment_ids"] > 0).astype(np.int32)
    return batch


def _media(rows: PlannedRows) -> dict[int, list[RowMedium]]:
    """Return the media of each row, in the order of its documents; these are whole."""
    counts = np.zeros_like(rows.document)
    for i, tokens in enumerate(rows.tokens):
        source_mask = rows.source == i
        counts[source_mask] = tokens.media_counts(rows.document[source_mask])
    row_media: dict[int, list[RowMedium]] = {}
    for piece in np.flatnonzero(counts):
        tokens, row = rows.tokens[rows.source[piece]], int(rows.row[piece])
        for medium in tokens.media(int(rows.document[piece])):
            row_media.setdefault(row, []).append(medium)
    return row_media


def _after_prompt(labels: NDArray[np.int32], segments: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return 0 for the tokens of a document before its first token with loss, and 1 for others."""
    learned = np.cumsum(labels != _IGNORED, axis=1)
    starts = np.diff(segments, axis=1, prepend=0) != 0
    learned_before = np.where(starts, learned - (labels != _IGNORED), 0)
    return (learned > np.maximum.accumulate(learned_before, axis=1)).astype(np.int32)


def _recordings(rows: PlannedRows) -> dict[int, RowAudio]:
    """Return the recording of each row; a row is one document."""
    recordings: dict[int, RowAudio] = {}
    places = zip(rows.source.tolist(), rows.document.tolist(), rows.row.tolist(), strict=True)
    for source, document, row in places:
        (audio,) = rows.tokens[source].media(document)
        assert isinstance(audio, RowAudio)
        recordings[row] = audio
    return recordings
