"""The fields of a row that are arguments of the chat template: `tools`, `chat_template_kwargs`.

Names and meaning are those of transformers and TRL. `tools` is a list of JSON schemas. It may be
JSON text, because a table has one type for each column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ed_data.errors import DataError
from ed_data.schema import KWARGS, TOOLS, Row

#: Parameters of `apply_chat_template` that this package sets itself.
_RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)


def template_arguments(row: Row, location: str) -> dict[str, Any]:
    """Return the arguments of the chat template in a row, including `tools`.

    Args:
        row: may have the fields `tools` and `chat_template_kwargs`; null and empty values are
            ignored.
        location: the row, for messages.

    Raises:
        DataError: a field has the wrong type, or sets a parameter that this package sets.
    """
    tools, kwargs = (_parse_json(row.get(name), name, location) for name in (TOOLS, KWARGS))
    arguments: dict[str, Any] = {}
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise _wrong(TOOLS, "a list of JSON schemas", tools, location)
        arguments[TOOLS] = tools
    if kwargs:
        if not isinstance(kwargs, Mapping):
            raise _wrong(KWARGS, "a mapping from names to values", kwargs, location)
        for name in kwargs:
            if name in _RESERVED:
                raise DataError(
                    f"{location}: {KWARGS} sets {name!r}, which is a parameter of "
                    "apply_chat_template and not a variable of the template; remove the name"
                )
        # A table contains null for names that a row does not have.
        arguments.update({name: value for name, value in kwargs.items() if value is not None})
    return arguments


def template_fields(arguments: Mapping[str, Any]) -> Row:
    """Return the fields of a row with these arguments, as JSON text."""
    kwargs = {name: value for name, value in arguments.items() if name != TOOLS}
    fields = {TOOLS: arguments.get(TOOLS), KWARGS: kwargs}
    return {name: json.dumps(value) for name, value in fields.items() if value}


def _parse_json(value: Any, name: str, location: str) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(
            f"{location}: {name!r} is a text, but not JSON: {error}; correct the row, or remove "
            "the "
            "field in format_callback"
        ) from error


def _wrong(name: str, expected: str, value: object, location: str) -> DataError:
    text = repr(value)
    text = text if len(text) < 80 else f"{text[:77]}…"
    return DataError(
        f"{location}: {name!r} must be {expected}, or the JSON text of {expected}, got {text}; "
        "correct the row, or remove the field in format_callback"
    )
