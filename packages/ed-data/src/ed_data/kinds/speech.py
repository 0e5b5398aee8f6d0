"""A recording and its transcript."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ed_data.errors import KeyPath
from ed_data.kinds.fields import Column, Row
from ed_data.kinds.record import KindOfRows, Schema
from ed_data.kinds.seq2seq import shift_decoder

if TYPE_CHECKING:
    from ed_data.config import Mixture
    from ed_data.kinds.record import Batch

_TRANSCRIPTS = ("sentence", "transcription")
_EXAMPLE: Row = {"audio": "speech.wav", "text": "two plus two"}


def _refuse_packing(mixture: Mixture, schema: Schema) -> Iterator[tuple[KeyPath, str]]:
    """Yield `pack_tokens`: a row contains one recording."""
    if mixture.pack_tokens:
        reason = "a row is one recording, so rows are not packed: set pack_tokens: false"
        yield ("pack_tokens",), reason


def keep_labels(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return only the labels of a batch: the model reads the recordings."""
    return {"labels": batch["labels"]}


#: A recording and its transcript, for encoder-decoders such as Whisper.
SPEECH_SEQ2SEQ = Schema(
    (Column("decoder", "text"),),
    "text",
    other_content=_TRANSCRIPTS,
    record=KindOfRows(
        _EXAMPLE,
        "speech_seq2seq",
        columns=("decoder",),
        labels=(),
        has_audio=True,
        has_decoder=True,
        arrays=shift_decoder,
        checks=_refuse_packing,
    ),
)
#: A recording and its transcript, for models that score the labels of each time step.
CTC = Schema(
    (Column("", "text"),),
    "text",
    other_content=_TRANSCRIPTS,
    record=KindOfRows(
        _EXAMPLE,
        "ctc",
        columns=("",),
        labels=(),
        has_audio=True,
        has_time_steps=True,
        arrays=keep_labels,
        checks=_refuse_packing,
    ),
)
