"""Contents on their way to the tokenizer: texts, messages, ids, and where each is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ed_data.errors import DataError
from ed_data.schema import Content, Message

T = TypeVar("T")


class Item(NamedTuple):
    """One field of one document, where it comes from, and arguments of the chat template."""

    content: Content
    where: str
    template: Mapping[str, Any] = MappingProxyType({})


class Tokens(NamedTuple):
    """One sequence of tokens.

    Attributes:
        ids: the tokens.
        mask: 1 where a token has loss; None where every token has.
        prompt: the number of tokens at the beginning that have no loss in any case.
        ends: where the steps of an answer end: after so many tokens.
    """

    ids: list[int]
    mask: list[int] | None = None
    prompt: int = 0
    ends: tuple[int, ...] = ()


def kind_of(content: Content) -> str:
    """Return `"text"`, `"chat"` or `"ids"`."""
    if isinstance(content, str):
        return "text"
    return "chat" if content and isinstance(content[0], dict) else "ids"


def of_one_kind(context: Content, body: Content, where: str) -> tuple[Content, Content]:
    """Context and body as two texts, two lists of messages, or two lists of ids.

    Raises:
        DataError: one is text and the other ids; `where` says of which row.
    """
    kinds = {kind_of(context), kind_of(body)}
    if kinds == {"text", "chat"}:
        return _messages(context, "user"), _messages(body, "assistant")
    if not context:
        return ("" if kinds == {"text"} else []), body
    if len(kinds) > 1:
        raise DataError(
            f"{where}: the field and its context are {' and '.join(sorted(kinds))}; both are "
            "text, chat messages or token ids"
        )
    return context, body


def _messages(content: Content, role: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}] if content else []
    return content  # type: ignore[return-value]


def with_blame(call: Callable[[list[Item]], list[T]], items: list[Item], problem: str) -> list[T]:
    """Call with all items at once; where that fails, find the row that is to blame."""
    try:
        return call(items)
    except Exception as error:  # whatever a template raises: jinja's own, and Python's
        blamed, reason = items[0], error
        for item in items:
            try:
                call([item])
            except Exception as own:
                blamed, reason = item, own
                break
        raise DataError(
            f"{blamed.where}: {problem}: {reason}; correct the row, or drop it in format_callback"
        ) from error
