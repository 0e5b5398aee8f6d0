"""Whole replies of a model as messages: the formats of a model, and `ReplyReader`.

The server parses replies while they are generated. A trainer has whole replies as tokens, and reads
them with the same formats and the same parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ed_infra.conversation import TOOL_FORMAT, renders_tools
from ed_infra.errors import ConfigError

from ed_esurge.replies.events import Reply
from ed_esurge.replies.formats import FormatT, ReasoningFormat, ToolFormat, detect, get_format
from ed_esurge.replies.json_text import loads_arguments
from ed_esurge.replies.parser import Calls, ReplyParser
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_esurge.tokenizer import Tokenizer

#: An id that the parser generates for a call without one.
_GENERATED = re.compile("call_[0-9a-f]{24}")


def choose_formats(
    tokenizer: Tokenizer, template: str, tool_parser_name: str, reasoning_parser: str
) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """Return the formats of a model's calls and thoughts; None: unknown, or treated as text.

    Args:
        tokenizer: tokenizer of the model.
        template: the chat template, Jinja text.
        tool_parser_name: a name of `TOOL_FORMATS`; "auto" = detect the format in the template and
            the vocabulary, or the format of `ed_infra.conversation` if the template renders no
            tools; "none" = calls are text.
        reasoning_parser: a name of `REASONING_FORMATS`, "auto" or "none".

    Raises:
        ConfigError: a name is unknown.
    """
    vocabulary = tokenizer.get_vocab()

    def choose(table: Mapping[str, FormatT], name: str, option: str) -> FormatT | None:
        if name == "auto":
            name = detect(table, template, vocabulary) or "none"
        return None if name == "none" else get_format(table, name, option)

    if tool_parser_name == "auto" and not renders_tools(template):
        tool_parser_name = TOOL_FORMAT
    return (
        choose(TOOL_FORMATS, tool_parser_name, "tool_parser_name"),
        choose(REASONING_FORMATS, reasoning_parser, "reasoning_parser"),
    )


class _AnyFunction(Mapping[str, Mapping[str, Any]]):
    """The parameters of functions by name; a function that does not exist has no parameters.

    So a call of a missing function is a call, to which an error is the reply, and not text.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._parameters.get(name, {})

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class ReplyReader:
    """Reads whole replies.

    Args:
        tokenizer: tokenizer of the model, with its chat template.
        tools: the functions that the model may call, in the format of OpenAI.
        tool_format, reasoning_format: names, see `choose_formats`.

    Raises:
        ConfigError: a name is unknown, or the format of the model's calls is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        template = str(tokenizer.chat_template or "")
        form, self._reasoning = choose_formats(tokenizer, template, tool_format, reasoning_format)
        if form is None:
            raise ConfigError(
                "the chat template of this model does not show the format of function calls: set "
                f"tool_format, one of {', '.join(sorted(TOOL_FORMATS))}"
            )
        functions = [tool["function"] for tool in tools]
        parameters = {one["name"]: one.get("parameters") or {} for one in functions}
        self._calls, self._tokenizer = Calls(form, _AnyFunction(parameters)), tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._special = frozenset(token.content for token in added if token.special)

    def __call__(self, ids: Sequence[int]) -> tuple[dict[str, Any], str]:
        """Return the message of a reply, and the fault of its calls.

        Args:
            ids: the tokens of the reply.

        Returns:
            A message with `role`, `content`, and, if present, `reasoning_content` and `tool_calls`,
            whose arguments are objects; and a text for the model, empty for a valid reply.
        """
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        reasoning = self._reasoning
        # The prompt may contain the beginning of the thoughts, which the reply then ends.
        first = [text.find(mark) for mark in reasoning.closes if mark in text] if reasoning else []
        opened = reasoning is not None and any(
            mark in text[: min(first, default=0)] for mark in reasoning.opens
        )
        parser = ReplyParser(
            self._calls, reasoning, inside=bool(first) and not opened, drops=self._special
        )
        reply = Reply().add([*parser.feed(text), *parser.close()])
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": self._choose_id(call.id, place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": loads_arguments(call.arguments)},
                }
                for place, call in enumerate(reply.calls.values())
            ]
            return message, ""
        form = self._calls.form
        if any(mark in reply.content for mark in (*form.opens, *form.begins)):
            return message, (
                "the text after the beginning of a call is no valid call: write the name of one "
                "function and its arguments in the format of the system message"
            )
        return message, ""

    def _choose_id(self, call_id: str, place: int) -> str:
        """Return an id that depends on the reply only, so that equal replies have equal results.

        An id that the model wrote is kept. Mistral's templates require nine letters and digits.
        """
        length = self._calls.form.id_length
        generated = len(call_id) == length if length else _GENERATED.fullmatch(call_id) is not None
        return f"call{place:05}" if generated else call_id
