"""Published formats of rows, converted to messages, prompts and answers.

`Inform.format` names a format. Without a name, the format of a row is found by its fields, if the
row has none of the fields that the schema reads. A new format is one entry of `ROW_FORMATS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ed_data.errors import DataError, listing
from ed_data.kinds.fields import unwrap_array
from ed_data.schema import IMAGE, IMAGES, TOOLS, Message, Row

Convert = Callable[[Row], Row]


@dataclass(frozen=True)
class RowFormat:
    """A published format of rows.

    Attributes:
        fields: fields that every row of the format has.
        convert: returns the row with `messages`, or with `prompt` and its answers.
        about: the fields in messages.
        is_row: additional test of a row with these fields; it also sees rows of other formats.
    """

    fields: tuple[str, ...]
    convert: Convert
    about: str
    is_row: Callable[[Row], bool] = lambda row: True

    def recognizes(self, row: Row) -> bool:
        """Return whether a row has this format."""
        return all(row.get(field) is not None for field in self.fields) and self.is_row(row)


#: Roles of ShareGPT and its relatives.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
#: Fields of a row that may contain turns.
_TURNS = ("conversations", "conversation", "prompt", "completion", "chosen", "rejected")
_SYSTEMS = ("system", "system_prompt")
_PLACEHOLDER = "<image>"


def _is_turn(value: object) -> bool:
    return isinstance(value, Mapping) and "from" in value and "value" in value


def _list_turns(value: object) -> list[Any]:
    value = unwrap_array(value)
    if isinstance(value, Mapping):
        return [value]
    return list(value) if isinstance(value, list | tuple) else []


def _first_turns(row: Row) -> list[Any]:
    return _list_turns(row.get("conversations", row.get("conversation")))


def _convert_turn(turn: Any) -> Message:
    """Return a message for `{"from": …, "value": …}`, or a message unchanged."""
    if not _is_turn(turn):
        return turn
    name, value = str(turn["from"]).lower(), turn["value"]
    if name not in _ROLES:
        raise DataError(
            f"the turn is from {turn['from']!r}; known are {', '.join(_ROLES)}: rename it in "
            "format_callback"
        )
    message: Message = {"role": _ROLES[name], "content": value}
    if name == "function_call":
        call = _parse_call(value)
        if call is not None:
            message = {"role": "assistant", "content": "", "tool_calls": call}
    return message


def _parse_call(value: str) -> list[dict[str, Any]] | None:
    """Return the calls of a JSON text such as `{"name": …, "arguments": …}`; None: it is text."""
    try:
        calls = json.loads(value)
    except (TypeError, ValueError):
        return None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def _convert_sharegpt(row: Row) -> Row:
    converted = dict(row)
    for field in _TURNS:
        turns = _list_turns(row.get(field))
        if any(map(_is_turn, turns)):
            converted[field] = [_convert_turn(turn) for turn in turns]
    field = "conversations" if "conversations" in row else "conversation"
    chat = converted.pop(field, None)
    if not isinstance(chat, list):
        raise DataError(f"the field 'conversations' is missing (fields: {listing(row)})")
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system.strip() and chat and chat[0].get("role") != "system":
        chat = [{"role": "system", "content": system}, *chat]
        converted = {name: converted[name] for name in converted if name not in _SYSTEMS}
    if {"chosen", "rejected"} <= row.keys():
        return {**converted, "prompt": chat}
    return {**converted, "messages": chat}


def _convert_llava(row: Row) -> Row:
    """Convert as ShareGPT; `<image>` in a text becomes the part of an image."""
    converted = _convert_sharegpt(row)
    for field in ("messages", "prompt"):
        chat = converted.get(field)
        if isinstance(chat, list):
            converted[field] = [_insert_images(message) for message in chat]
    return converted


def _insert_images(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or _PLACEHOLDER not in content:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(_PLACEHOLDER)):
        parts += [{"type": "image"}] if number else []
        # The line break next to a placeholder belongs to the format.
        text = text.removeprefix("\n") if number else text
        parts += [{"type": "text", "text": text}] if text.strip() else []
    return {**message, "content": parts}


def _convert_alpaca(row: Row) -> Row:
    """Return a question of `instruction` and `input`, and `output` as the answer."""
    answers = ("output", "chosen", "rejected")
    question = str(row["instruction"])
    if isinstance(row.get("input"), str) and row["input"].strip():
        question = f"{question}\n\n{row['input']}"
    prompt: list[Message] = [{"role": "user", "content": question}]
    for pair in reversed(_list_history(row.get("history"))):
        roles = zip(("user", "assistant"), pair, strict=False)
        prompt = [*({"role": role, "content": str(text)} for role, text in roles), *prompt]
    if isinstance(row.get("system"), str) and row["system"].strip():
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    read = {"instruction", "input", "history", "system", *answers}
    converted: Row = {name: value for name, value in row.items() if name not in read}
    converted["prompt"] = prompt
    for field in answers:
        answer = row.get(field)
        if isinstance(answer, str):
            name = "completion" if field == "output" else field
            converted[name] = [{"role": "assistant", "content": answer}]
    return converted


def _list_history(value: object) -> list[Any]:
    return [pair for pair in _list_turns(value) if isinstance(pair, list | tuple)]


def _convert_openai(row: Row) -> Row:
    """Return the row of OpenAI's fine-tuning formats: chats, and pairs of preferred answers."""
    if "messages" in row:
        return dict(row)
    source = row["input"]
    converted = {name: value for name, value in row.items() if name not in _OPENAI_PAIRS}
    converted["prompt"] = list(source["messages"])
    converted["chosen"] = list(row["preferred_output"])
    converted["rejected"] = list(row["non_preferred_output"])
    if source.get("tools"):
        converted[TOOLS] = source["tools"]
    return converted


_OPENAI_PAIRS = ("input", "preferred_output", "non_preferred_output")


def _has_messages(row: Row) -> bool:
    if isinstance(row.get("input"), Mapping):
        return "messages" in row["input"] and set(_OPENAI_PAIRS) <= row.keys()
    turns = _list_turns(row.get("messages"))
    return bool(turns) and all(isinstance(turn, Mapping) and "role" in turn for turn in turns)


def _has_turns(row: Row) -> bool:
    return bool(_first_turns(row)) and all(map(_is_turn, _first_turns(row)))


def _has_images(row: Row) -> bool:
    texts = (str(turn.get("value")) for turn in _first_turns(row) if isinstance(turn, Mapping))
    names_image = row.get(IMAGE) is not None or row.get(IMAGES) is not None
    return _has_turns(row) and names_image and any(_PLACEHOLDER in text for text in texts)


#: Formats by name. The first format that recognizes a row is its format.
ROW_FORMATS: dict[str, RowFormat] = {
    "llava": RowFormat((), _convert_llava, "conversations with <image>, image", _has_images),
    "sharegpt": RowFormat((), _convert_sharegpt, "conversations with from and value", _has_turns),
    "alpaca": RowFormat(
        ("instruction",),
        _convert_alpaca,
        "instruction, input, output",
        lambda row: "output" in row or {"chosen", "rejected"} <= row.keys(),
    ),
    "openai": RowFormat((), _convert_openai, "messages with role and content", _has_messages),
}
#: Fields that the formats read, for readers of tables, which read only the fields that they need.
FORMAT_FIELDS = (
    *("messages", "conversations", "conversation", "system", "system_prompt", "instruction"),
    *("input", "output", "history", "prompt", "completion", "chosen", "rejected"),
    *("preferred_output", "non_preferred_output"),
)


def detect_format(row: Row) -> str | None:
    """Return the name of the format of a row, or None."""
    return next((name for name, form in ROW_FORMATS.items() if form.recognizes(row)), None)


def convert_row(name: str, row: Row, location: str) -> Row:
    """Return a row of a format with the fields of this project.

    Raises:
        DataError: the row does not have the format.
    """
    form = ROW_FORMATS[name]
    try:
        if any(row.get(field) is None for field in form.fields):
            raise DataError(f"a field of {form.fields} is missing (fields: {listing(row)})")
        return form.convert(row)
    except (DataError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{location}: the row has not the format {name!r} ({form.about}): {error}; correct the "
            "row, or the format",
            ("format",),
        ) from error
