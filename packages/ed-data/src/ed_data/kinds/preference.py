"""A prompt with a better and a worse answer."""

from __future__ import annotations

from ed_data.kinds.fields import Column, Row, Value
from ed_data.kinds.record import KindOfRows, Schema

_EXAMPLE: Row = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
_PAIR = KindOfRows(_EXAMPLE)


def keep_pair(row: Row) -> tuple[Row, ...]:
    """Return a pair as the one row that it is."""
    return (row,)


#: A prompt with a better and a worse answer: `chosen_input_ids`, …, `rejected_input_ids`, ….
PREFERENCE = Schema(
    (Column("chosen", "chosen", "prompt"), Column("rejected", "rejected", "prompt")),
    "prompt",
    record=_PAIR,
)
#: A preference pair with a third answer that is known to be right, `reference`.
GOLD_PREFERENCE = Schema(
    (*PREFERENCE.columns, Column("reference", "reference", "prompt")),
    "prompt",
    record=KindOfRows({**_EXAMPLE, "chosen": " It is 4.", "reference": " 4"}),
)
#: A preference pair with the `margin` between its answers; 0 in rows without the field.
REWARD = Schema(
    PREFERENCE.columns,
    "prompt",
    (Value("margin", "margin", "chosen", 0.0),),
    record=KindOfRows({**_EXAMPLE, "margin": 2.0}),
)
#: A prompt with a better and a worse answer for encoder-decoders: the encoder reads the prompt.
SEQ2SEQ_PREFERENCE = Schema(
    (Column("", "prompt"), Column("chosen", "chosen"), Column("rejected", "rejected")),
    "prompt",
    record=KindOfRows(_EXAMPLE, read_pair=keep_pair, needs_prompt=True),
)
