"""A text, a chat, or a list of token ids in one field."""

from __future__ import annotations

import logging

from ed_data.errors import DataError
from ed_data.kinds.answers import COMPLETION
from ed_data.kinds.fields import Column, Row
from ed_data.kinds.record import KindOfRows, Schema

log = logging.getLogger("ed_data")

#: Fields with a question, and with answers to it.
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_ANSWERS = ("completion", "output", "response", "answer", "chosen", "rejected")


def check_row(row: Row, name: str, is_named: bool, label: str) -> None:
    """Check that the method reads what a row can teach.

    A field that `content_field` names explicitly is accepted, unless it is a prompt.

    Args:
        row: the first row.
        name: the field with the content.
        is_named: whether the inform names the field.
        label: name of the inform, for messages.

    Raises:
        DataError: the row has answers, such as `completion`, `chosen` and `rejected`, and the
            field is a prompt, or a field that the inform does not name.
    """
    answers = [field for field in _ANSWERS if row.get(field) is not None and field != name]
    is_pair = {"chosen", "rejected"} <= row.keys()
    if not answers or (is_named and name not in _PROMPTS):
        if answers and not is_pair:
            log.warning(
                "inform %s: the rows have the field %r, which is not trained on, because "
                "content_field is %r",
                label,
                answers[0],
                name,
            )
        return
    if is_pair:
        raise DataError(
            f"inform {label!r}: the first row is a preference pair ('chosen' and "
            f"'rejected'), but only its {name!r} would be trained on: use a method for pairs "
            "(dpo, orpo, reward), or name the field, such as content_field: chosen",
            ("content_field",),
        )
    if is_named:
        raise DataError(
            f"inform {label!r}: the rows have the answer {answers[0]!r}, but only "
            f"their {name!r} would be trained on: omit content_field, and name the fields "
            f"prompt and completion (format_fields: {{{name}: prompt, {answers[0]}: "
            "completion}) to learn the answers",
            ("content_field",),
        )


#: A text, a chat, or token ids in one field.
TEXT = Schema(
    (Column("", "content"),),
    other_content=("messages",),
    record=KindOfRows(
        {"content": "2 + 2 = 4"}, is_text=True, other_schema=COMPLETION, check_row=check_row
    ),
)
