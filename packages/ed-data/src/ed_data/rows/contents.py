"""The contents of fields: texts, chat messages, token ids, steps of answers, numbers.

Errors name the row (`where`) and the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ed_data.errors import DataError, did_you_mean
from ed_data.schema import Content, Message


def checked(value: Any, field: str, where: str, is_content: bool) -> Content | None:
    """Return a text, messages or ids; None if the value is empty.

    Args:
        value: value of the field.
        field: name of the field.
        where: the row, for messages.
        is_content: whether `content_field` names the field.

    Raises:
        DataError: the value has another type, or contains half of a surrogate pair.
    """
    if value is None:
        return None
    if isinstance(value, str):
        _check_text(value, field, where, is_content)
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
                _check_text(text, field, where, is_content)
            return items
        wrong = "contains neither chat messages {'role': …, 'content': …} nor token ids"
    raise DataError(
        f"{where}: {field!r} {wrong}; correct the row, or return None for it in format_callback"
    )


def _is_message(value: dict[str, Any]) -> bool:
    """Return whether a mapping is a chat message; a tool call has no content."""
    return isinstance(value.get("role"), str) and ("content" in value or "tool_calls" in value)


def checked_parts(
    value: Any, field: str, where: str, is_content: bool, *, words: bool
) -> Content | None:
    """Return the steps of an answer, or the words of a text; None if the value is empty.

    Args:
        value: value of the field.
        field: name of the field.
        where: the row, for messages.
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
            f"{where}: {field!r} must be a list of texts, {kind}, got {value!r}; "
            "correct the row, or drop it in format_callback"
        )
    for text in value or ():
        _check_text(text, field, where, is_content)
    return list(value) if value else None


def number(value: Any, field: str, where: str) -> float:
    """Return a number; true is 1 and false is 0.

    Raises:
        DataError: the value is not a finite number.
    """
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise DataError(
            f"{where}: {field!r} must be a number, true or false, got {value!r}; correct the row, "
            "or drop it in format_callback"
        )
    return float(value)


def class_number(value: Any, field: str, where: str, classes: tuple[str, ...] = ()) -> float:
    """Return the number of a class.

    Args:
        value: the number, or one of the names in `classes`.
        field: name of the field.
        where: the row, for messages.
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
            f"{where}: {field!r} must be a class, got {value!r}{similar}; label_names has "
            f"{len(classes)} classes: use their names or the numbers 0 to {len(classes) - 1}"
        )
    raise DataError(
        f"{where}: {field!r} must be the number of a class, an integer of at least 0, got "
        f"{value!r}; set label_names to use the names of classes"
    )


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in nested lists and mappings: message parts and tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _check_text(text: str, field: str, where: str, is_content: bool) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{where}, {'content_field' if is_content else repr(field)}: the tokenizer cannot "
            f"encode the text: {half} at character {error.start} is half of a surrogate pair; "
            "correct the row, or drop it in format_callback"
        ) from error


def kind_of(content: Content) -> str:
    """Return `"text"`, `"chat"` or `"ids"`."""
    if isinstance(content, str):
        return "text"
    return "chat" if content and isinstance(content[0], dict) else "ids"


def of_one_kind(context: Content, body: Content, where: str) -> tuple[Content, Content]:
    """Return context and body as two texts, two lists of messages, or two lists of ids.

    Raises:
        DataError: one of them is a text or a chat, and the other is a list of ids.
    """
    kinds = {kind_of(context), kind_of(body)}
    if kinds == {"text", "chat"}:
        return _messages(context, "user"), _messages(body, "assistant")
    if not context:
        return ("" if kinds == {"text"} else []), body
    if len(kinds) > 1:
        raise DataError(
            f"{where}: the field and its context are {' and '.join(sorted(kinds))}; both must be "
            "text, chat messages or token ids"
        )
    return context, body


def _messages(content: Content, role: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}] if content else []
    return content  # type: ignore[return-value]
