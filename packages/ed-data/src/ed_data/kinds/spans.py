"""A question, its context, and the answer as a span of the context, as in SQuAD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ed_data.errors import DataError
from ed_data.kinds.fields import Column, Content, Value, unwrap_array
from ed_data.kinds.record import KindOfRows, Schema
from ed_data.kinds.targets import refuse_packing

if TYPE_CHECKING:
    from ed_data.kinds.record import Batch

#: Default number of tokens that consecutive windows of a context share.
STRIDE = 128
#: Names of the positions of the first and the last token of an answer.
SPAN = ("start_positions", "end_positions")


def read_end(
    item: object,
    value: Value,
    schema: Schema,
    fields: Mapping[str, Content],
    field: str,
    location: str,
) -> float:
    """Return an end of the answer in the context; see `KindOfRows.read_value`."""
    (column,) = schema.columns
    return read_span(item, fields[str(column.second)], field, location)[SPAN.index(value.name)]


def read_span(value: object, context: Content, field: str, location: str) -> tuple[float, float]:
    """Return the first character of the first answer and the character after it; -1 without answer.

    Args:
        value: `{"text": [...], "answer_start": [...]}`, as in SQuAD.
        context: the text that contains the answer.
        field: name of the field.
        location: the row, for messages.

    Raises:
        DataError: the value has another form, or the context does not contain the answer there.
    """
    lists = []
    if isinstance(value, dict):
        for name in ("text", "answer_start"):
            field_value = unwrap_array(value.get(name))
            lists.append([field_value] if isinstance(field_value, str | int) else field_value)
    same = len(lists) == 2 and all(isinstance(item, list | tuple) for item in lists)
    if not same or len(lists[0]) != len(lists[1]):
        raise DataError(
            f"{location}: {field!r} must be {{'text': [...], 'answer_start': [...]}} with lists of "
            f"one length, got {value!r}; correct the row, or rename its fields in format_callback"
        )
    if not lists[0]:
        return -1.0, -1.0
    text, start = lists[0][0], lists[1][0]
    inside = isinstance(context, str) and isinstance(text, str) and isinstance(start, int) and text
    if not inside or context[start : start + len(text)] != text:
        raise DataError(
            f"{location}: the context does not contain the answer {text!r} at the character "
            f"{start!r}; correct answer_start, which counts characters from 0"
        )
    return float(start), float(start + len(text))


def place_spans(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return the arrays of a batch with the positions of its answers int32 [b], without labels."""
    del batch["labels"]
    for name in SPAN:
        batch[name] = batch[name][:, 0].clip(min=0).astype("int32")
    return batch


_SPANS = KindOfRows(
    {
        "question": "What is 2 + 2?",
        "context": "2 + 2 is 4.",
        "answers": {"text": ["4"], "answer_start": [9]},
    },
    "question_answering",
    columns=("",),
    labels=SPAN,
    has_windows=True,
    read_value=read_end,
    arrays=place_spans,
    checks=refuse_packing,
)


def answer_schema(stride: int = STRIDE) -> Schema:
    """Return the schema of questions about a context, as in SQuAD.

    Rows have `question`, `context` and `answers`: `{"text": [...], "answer_start": [...]}`, empty
    lists if there is no answer. A long context becomes several documents. All questions about a
    context are held out together.

    Args:
        stride: number of tokens of the context that consecutive windows share.
    """
    values = (
        *(Value(name, "answers") for name in SPAN),
        Value("token_type_ids", "context", token_types=True),
    )
    column = Column("", "question", second="context", stride=stride)
    return Schema((column,), "context", values, record=_SPANS)


#: A question, its context and its answers: `start_positions` and `end_positions` [b].
QUESTION_ANSWERING = answer_schema()
