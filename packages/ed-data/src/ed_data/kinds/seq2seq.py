"""A source text and a target text for encoder-decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_data.kinds.fields import Column
from ed_data.kinds.record import KindOfRows, Schema

if TYPE_CHECKING:
    from ed_data.kinds.record import Batch


def shift_decoder(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Replace the decoder tokens by the labels shifted right within each segment."""
    import numpy as np  # not needed to check a run file

    batch["labels"] = batch.pop("decoder_labels")
    ids, segments = batch["decoder_input_ids"], batch["decoder_segment_ids"]
    shifted = np.roll(ids, 1, axis=1)
    shifted[batch["decoder_position_ids"] == 0] = start
    batch["decoder_input_ids"] = np.where(segments > 0, shifted, pad_id).astype(np.int32)
    return batch


#: A source text and a target text for encoder-decoder models.
SEQ2SEQ = Schema(
    (Column("", "prompt"), Column("decoder", "completion")),
    "prompt",
    record=KindOfRows(
        {"prompt": "2 + 2 =", "completion": "4"},
        "seq2seq_lm",
        columns=("", "decoder"),
        labels=(),
        has_decoder=True,
        is_aligned=False,
        arrays=shift_decoder,
    ),
)
