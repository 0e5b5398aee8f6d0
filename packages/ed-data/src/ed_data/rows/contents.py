"""The contents of fields: texts, chat messages, token ids, steps of answers, prompts of answers.

Errors name the row (`location`) and the field.

Public preference data has three layouts: the answers follow the prompt; `chosen` and `rejected` are
whole chats in addition to a `prompt`; or there is no `prompt`, and the answers have a common
prefix. The rule for the last layout is `extract_prompt` of TRL. `split_pair` applies these rules
for methods that read a prompt, or single answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from ed_data.errors import DataError
from ed_data.kinds.fields import PAIR, has_field, unwrap_array
from ed_data.kinds.record import KindOfRows
from ed_data.schema import Content, Message, Row

#: A message has one of these fields.
_MESSAGE_FIELDS = frozenset({"content", "tool_calls", "function_call"})
#: Roles of the first message of a prompt.
_ASKING = ("system", "developer", "user")


def check_content(value: object, field: str, location: str, is_content: bool) -> Content | None:
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
    value = unwrap_array(value)
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
    value: object, field: str, location: str, is_content: bool, *, words: bool
) -> Content | None:
    """Return the steps of an answer, or the words of a text; None if the value is empty.

    Args:
        value: value of the field.
        field: name of the field.
        location: the row, for messages.
        is_content: whether `content_field` names the field.
        words: whether the value is a list of words, which may be empty texts.
    """
    value = unwrap_array(value)
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
    field_value = unwrap_array(row.get(field))
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


def is_chat(content: Content) -> TypeGuard[list[Message]]:
    """Return whether a content is a chat with at least one message."""
    return get_kind(content) == "chat"


def is_ids(content: Content) -> TypeGuard[list[int]]:
    """Return whether a content is a list of token ids; an empty list is one."""
    return get_kind(content) == "ids"


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
    return content if is_chat(content) else []


def separate_prompt(
    prompt: Content | None, answers: dict[str, Content], location: str
) -> tuple[Content, dict[str, Content]]:
    """Return the prompt, and the answers without the prompt.

    Args:
        prompt: prompt of the row, or None.
        answers: answers by field; at least two if there is no prompt.
        location: the row, for messages.

    Raises:
        DataError: the parts of the row contradict each other.
    """
    are_chats = [get_kind(answer) == "chat" for answer in answers.values()]
    if prompt is None or (not prompt and len(answers) > 1 and all(are_chats)):
        return _shared_prompt(answers, location)
    if prompt and any(are_chats) and (isinstance(prompt, str) or is_chat(prompt)):
        return _without_prompt(prompt, answers, location)
    return prompt, answers


def split_pair(row: Row, kind: KindOfRows, name: str, location: str) -> tuple[Row, ...]:
    """Return the rows of a kind that a preference pair becomes.

    Args:
        row: a row with `chosen` and `rejected`. Its prompt may be their common prefix.
        kind: the kind of rows.
        name: field of the prompt.
        location: the row, for messages.

    Raises:
        DataError: the parts of the row contradict each other, or the kind needs a prompt, and the
            answers have no common prefix.
    """
    assert kind.read_pair is not None, "the kind reads pairs"
    answers = {side: check_content(row[side], side, location, False) or "" for side in PAIR}
    prompt = check_content(row[name], name, location, True) if has_field(row, name) else None
    is_absent = not has_field(row, name)
    prompt, answers = separate_prompt(None if is_absent else prompt or "", answers, location)
    if not prompt and is_absent and kind.needs_prompt:
        raise DataError(
            f"{location}: the row has no {name!r}, and 'chosen' and 'rejected' have no common "
            f"beginning that would be the prompt; add the field {name!r}, or drop the row in "
            "format_callback"
        )
    return kind.read_pair({**row, name: prompt, **answers})


def _shared_prompt(
    answers: dict[str, Content], location: str
) -> tuple[Content, dict[str, Content]]:
    """Split off the longest common prefix of the answers as the prompt, as in TRL.

    Each answer keeps at least one message (character, token). A space before the first difference
    of two texts belongs to the answers.
    """
    kinds = {name: get_kind(answer) for name, answer in answers.items()}
    if len({*kinds.values()}) > 1:
        listed = " and ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
        raise DataError(
            f"{location}: the row has no prompt, and {listed}: the prompt is the common prefix of "
            "both answers; add the field 'prompt', or use the same format for both"
        )
    length = _count_common_prefix(list(answers.values()))
    first = next(iter(answers.values()))
    if not length and isinstance(first[0], dict) and first[0]["role"] in _ASKING:
        raise DataError(
            f"{location}: the row has no prompt, and {' and '.join(map(repr, answers))} begin with "
            "different messages; add the field 'prompt', or correct the row"
        )
    return first[:length], {name: answer[length:] for name, answer in answers.items()}


def _without_prompt(
    prompt: str | list[Message], answers: dict[str, Content], location: str
) -> tuple[Content, dict[str, Content]]:
    """Remove the prompt from the answers that are whole chats; do not change other answers.

    A text prompt is the content of a user message. The system message may occur only in the prompt
    or only in the chats.
    """
    chats = {name: answer for name, answer in answers.items() if is_chat(answer)}
    repeated = {
        name: length
        for name, chat in chats.items()
        if (
            length := _count_prompt_messages(
                prompt, chat, [*chats.values()], f"{location}, {name!r}"
            )
        )
    }
    if not repeated:
        if isinstance(prompt, str) and len(chats) < len(answers):
            # The answers of a row have one format, so a text becomes a message.
            return [{"role": "user", "content": prompt}], answers
        return prompt, answers
    heads = [chats[name][:length] for name, length in repeated.items()]
    if any(_normalize_messages(head) != _normalize_messages(heads[0]) for head in heads):
        raise DataError(
            f"{location}: {' and '.join(map(repr, repeated))} are whole chats that begin with "
            "different prompts; correct the row"
        )
    head = heads[0]
    if isinstance(prompt, list) and _is_system(prompt[0]) and not _is_system(head[0]):
        head = [prompt[0], *head]
    return head, {name: answer[repeated.get(name, 0) :] for name, answer in answers.items()}


def _count_common_prefix(answers: Sequence[Content]) -> int:
    """Return the length of the common prefix of all answers, less than that of any answer.

    A space before the first difference of texts does not belong to the prefix.
    """
    first, *other_answers = answers
    shortest = min(map(len, answers))
    for i in range(shortest):
        if any(first[i] != answer[i] for answer in other_answers):
            return i - 1 if i and isinstance(first, str) and first[i - 1] == " " else i
    return max(shortest - 1, 0)


def _count_prompt_messages(
    prompt: str | list[Message], chat: list[Message], chats: list[list[Message]], location: str
) -> int:
    """Return how many messages of a chat are the prompt; 0 if the chat is only an answer."""
    if isinstance(prompt, str):
        return _with_question(prompt, chat, chats, location)
    forms = [prompt]
    if _is_system(prompt[0]):
        forms.append(prompt[1:])
    elif _is_system(chat[0]):
        forms.append([chat[0], *prompt])
    for form in forms:
        if (
            form
            and len(form) < len(chat)
            and _normalize_messages(chat[: len(form)]) == _normalize_messages(form)
        ):
            return len(form)
    follows_an_answer = prompt[-1]["role"] == "assistant"
    if _is_system(chat[0]) or (chat[0]["role"] == "user" and not follows_an_answer):
        raise _contradiction(location, "its first messages differ from the prompt")
    return 0


def _with_question(
    text: str, chat: list[Message], chats: list[list[Message]], location: str
) -> int:
    """Return `_count_prompt_messages` for a text prompt, the content of a user message."""
    if chat[0]["role"] not in _ASKING:
        return 0
    question_indexes = [i for i, message in enumerate(chat[:-1]) if _is_question(message, text)]
    if not question_indexes:
        raise _contradiction(location, "no user message of the chat is the prompt")
    question_chats = [row_chat for row_chat in chats if row_chat[0]["role"] in _ASKING]
    if len(question_chats) == 1:
        return question_indexes[-1] + 1
    # The prompt of a pair may continue after the message that equals the text.
    shared = _count_common_prefix(question_chats)
    if shared <= question_indexes[0]:
        raise _contradiction(location, "the chats differ before the message that is the prompt")
    return shared


def _contradiction(location: str, reason: str) -> DataError:
    return DataError(
        f"{location}: the answer is a chat that begins with a question, and it contradicts the "
        "field "
        f"'prompt': {reason}; correct the row, or remove 'prompt' in format_callback to use the "
        "prompt of the chats"
    )


def _is_question(message: Message, text: str) -> bool:
    content = message.get("content")
    is_text = isinstance(content, str)
    return message["role"] == "user" and is_text and content.strip() == text.strip()


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message["role"] in ("system", "developer")


def _normalize_messages(messages: list[Message]) -> list[Message]:
    """Return messages without the nulls that a table adds, and with stripped contents."""
    return [
        {
            key: value.strip() if key == "content" and isinstance(value, str) else value
            for key, value in message.items()
            if value is not None
        }
        for message in messages
    ]
