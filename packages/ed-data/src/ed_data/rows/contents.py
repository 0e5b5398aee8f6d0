"""The contents of fields: texts, chat messages, token ids, steps of answers, numbers.

Errors name the row (`location`) and the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ed_data.errors import DataError, did_you_mean
from ed_data.schema import Content, Message

#: A message has one of these fields.
_MESSAGE_FIELDS = frozenset({"content", "tool_calls", "function_call"})


def check_content(value: Any, field: str, location: str, is_content: bool) -> Content | None:
    """Return a text, messages or ids; None if the value is empty.

    Args:
        value: value of the field.
        field: name of the field.
        location: the row, for messages.
        is_content: whether `content_field` names the field.

    Raises:
        DataError: the value has another type, or contains half of a surrogate pair.
    """
    if value is None:
        return None
    if isinstance(value, str):
        _check_text(value, field, location, is_content)
        return value if value.strip() else None
    if hasattr(value, "tolist"):
        value = value.tolist()
    wrong = f"is a {type(value).__name__}; it must be a text, a list of chat messages or token ids"
    if isinstance(value, list | tuple):
        items = list(value)
        if not items:
            return None
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, dict) and _is_message(item) for item in items):
            for text in _texts(items):
                _check_text(text, field, location, is_content)
            return items
        wrong = "contains neither chat messages {'role': …, 'content': …} nor token ids"
    raise DataError(
        f"{location}: {field!r} {wrong}; correct the row, or return None for it in format_callback"
    )


def _is_message(value: dict[str, Any]) -> bool:
    """Return whether a mapping is a chat message; a call has no content."""
    return isinstance(value.get("role"), str) and not _MESSAGE_FIELDS.isdisjoint(value)


def checked_parts(
    value: Any, field: str, location: str, is_content: bool, *, words: bool
) -> Content | None:
    """Return the steps of an answer, or the words of a text; None if the value is empty.

    Args:
        value: value of the field.
        field: name of the field.
        location: the row, for messages.
        is_content: whether `content_field` names the field.
        words: whether the value is a list of words, which may be empty texts.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is not None and not (
        isinstance(value, list | tuple)
        and all(isinstance(v, str) and (words or v.strip()) for v in value)
    ):
        kind = "the words of a text" if words else "the steps of an answer"
        raise DataError(
            f"{location}: {field!r} must be a list of texts, {kind}, got {value!r}; "
            "correct the row, or drop it in format_callback"
        )
    for text in value or ():
        _check_text(text, field, location, is_content)
    return list(value) if value else None


def number(value: object, field: str, location: str) -> float:
    """Return a number; true is 1 and false is 0.

    Raises:
        DataError: the value is not a finite number.
    """
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise DataError(
            f"{location}: {field!r} must be a number, true or false, got {value!r}; correct the "
            "row, "
            "or drop it in format_callback"
        )
    return float(value)


def class_number(value: object, field: str, location: str, classes: tuple[str, ...] = ()) -> float:
    """Return the number of a class.

    Args:
        value: the number, or one of the names in `classes`.
        field: name of the field.
        location: the row, for messages.
        classes: names of all classes; empty if only numbers are allowed.

    Raises:
        DataError: the value is neither the number nor the name of a class.
    """
    if isinstance(value, str) and value in classes:
        return float(classes.index(value))
    if isinstance(value, int) and value >= 0 and (not classes or value < len(classes)):
        return float(value)
    if classes:
        similar = did_you_mean(value, classes) if isinstance(value, str) else ""
        raise DataError(
            f"{location}: {field!r} must be a class, got {value!r}{similar}; label_names has "
            f"{len(classes)} classes: use their names or the numbers 0 to {len(classes) - 1}"
        )
    raise DataError(
        f"{location}: {field!r} must be the number of a class, an integer of at least 0, got "
        f"{value!r}; set label_names to use the names of classes"
    )


def read_texts(
    row: dict[str, Any], field: str, count: int, location: str, *, exact: bool
) -> list[str]:
    """Return the texts of a list of texts.

    The row has the list, or a single text if `count` is 1, or the fields `<field>_1`, `<field>_2`,
    … (the singular of `choices` is `choice`).

    Args:
        row: the row.
        field: name of the list.
        count: number of texts that are read, the first ones.
        location: the row, for messages.
        exact: whether the list may not have more texts.

    Raises:
        DataError: there are fewer than `count` texts, or one of them is no text.
    """
    field_value: Any = row.get(field)
    field_value = field_value.tolist() if hasattr(field_value, "tolist") else field_value
    names = get_field_names(field, count + 1)
    if field_value is None and names[0] in row:
        field_value = [row[name] for name in names if row.get(name) is not None]
    if isinstance(field_value, str):
        field_value = [field_value]
    texts = list(field_value) if isinstance(field_value, list | tuple) else []
    if len(texts) < count or (exact and len(texts) > count):
        raise DataError(
            f"{location}: {field!r} must be a list of {count} texts, or the row has the fields "
            f"{names[0]} to {names[count - 1]}, got {field_value!r}; correct the row, or the number"
        )
    for text in texts[:count]:
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{location}: {field!r} must contain texts that are not empty, got {text!r}; "
                "correct "
                "the row, or drop it in format_callback"
            )
        _check_text(text, field, location, False)
    return texts[:count]


def get_field_names(field: str, count: int) -> list[str]:
    """Return the names of single fields of a list: `negative_1`, `negative_2`, …."""
    stem = field.removesuffix("s")
    return [f"{stem}_{number + 1}" for number in range(count)]


def margins(value: Any, count: int, field: str, location: str) -> list[float]:
    """Return the margin by which a teacher prefers a positive text to each negative text.

    Args:
        value: the margin of one negative text, a list of margins, or the scores of the positive and
            of all negative texts.
        count: number of negative texts.
        field: name of the field.
        location: the row, for messages.

    Raises:
        DataError: the number of values differs.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    values = list(value) if isinstance(value, list | tuple) else [value]
    if len(values) not in (count, count + 1):
        raise DataError(
            f"{location}: {field!r} must have {count} margins, or {count + 1} scores (of the "
            "positive "
            f"text, then of each negative text), got {value!r}; correct the row"
        )
    numbers = [number(item, field, location) for item in values]
    if len(numbers) == count:
        return numbers
    return [numbers[0] - negative_score for negative_score in numbers[1:]]


def span(value: object, context: Content, field: str, location: str) -> tuple[float, float]:
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
            field_value: Any = value.get(name)
            field_value = field_value.tolist() if hasattr(field_value, "tolist") else field_value
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


def _texts(value: object) -> Iterator[str]:
    """Yield every text in nested lists and mappings: message parts and tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _check_text(text: str, field: str, location: str, is_content: bool) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{location}, {'content_field' if is_content else repr(field)}: the tokenizer cannot "
            f"encode the text: {half} at character {error.start} is half of a surrogate pair; "
            "correct the row, or drop it in format_callback"
        ) from error


def get_kind(content: Content) -> str:
    """Return `"text"`, `"chat"` or `"ids"`."""
    if isinstance(content, str):
        return "text"
    return "chat" if content and isinstance(content[0], dict) else "ids"


def unify_kinds(context: Content, body: Content, location: str) -> tuple[Content, Content]:
    """Return context and body as two texts, two lists of messages, or two lists of ids.

    Raises:
        DataError: one of them is a text or a chat, and the other is a list of ids.
    """
    kinds = {get_kind(context), get_kind(body)}
    if kinds == {"text", "chat"}:
        return _messages(context, "user"), _messages(body, "assistant")
    if not context:
        return ("" if kinds == {"text"} else []), body
    if len(kinds) > 1:
        raise DataError(
            f"{location}: the field and its context are {' and '.join(sorted(kinds))}; both must "
            "be "
            "text, chat messages or token ids"
        )
    return context, body


def _messages(content: Content, role: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}] if content else []
    return content  # type: ignore[return-value]
