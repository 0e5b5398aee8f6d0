"""Conversations as text: templates of the model in this process, of requests in a child."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.children.process import JobGroup
from ed_esurge.render_time import RENDER_TIMER, TemplateTimeError
from ed_esurge.server.generation.requests import ChatMessage
from ed_esurge.server.generation.structured import Tool
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.options import compile_pattern
from ed_esurge.template import ChatTemplate, texts_in
from ed_esurge.tokenizer import Tokenizer
from ed_esurge.untrusted_template import (
    TooLongTextError,
    UntrustedTemplateError,
    UntrustedTemplates,
)

RenderedText = tuple[str, re.Pattern[str]]
"""The text, and the pattern of its marks; see `ChatTemplate.render`."""

#: Limit of the texts that a template may repeat: characters of the variables of a request (or of
#: its special tokens), times messages.
MAX_REPEATED = 2**25


@dataclass(frozen=True)
class ConversationOptions:
    """What a template receives beside the messages.

    Attributes:
        variables: `chat_template_kwargs` of the request.
        documents: documents for the template.
        chat_template: Jinja text that replaces the template of the model.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    documents: Sequence[dict[str, Any]] = ()
    chat_template: str | None = None


class ConversationRenderer:
    """Renders conversations for one model.

    Args:
        tokenizer: Hugging Face tokenizer of the model.
        template: the template of the model; None = there is none.
        template_text: the text of the template.
        most: limit of a text in characters.
        check_length: raises APIError for a number of characters beyond the limit.
        volatile_lines: see `AppOptions.volatile_lines`.

    Attributes:
        is_slow: whether the template of the model has exceeded its processor time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        template_text: str,
        most: int,
        check_length: Callable[[int, str], None],
        volatile_lines: Sequence[str],
    ) -> None:
        self._tokenizer, self._template, self._template_text = tokenizer, template, template_text
        self._most, self._check_length = most, check_length
        self._untrusted = UntrustedTemplates(tokenizer)
        self._volatile_lines = [compile_pattern(pattern) for pattern in volatile_lines]
        self.is_slow = False

    def start(self) -> None:
        """Start the process that renders the templates of requests, and wait for its imports."""
        message = {"role": "user", "content": "a"}
        self._untrusted.render("{{ messages[0].content }}", [message], {}, 2**20)

    def choose_template(self, options: ConversationOptions) -> ChatTemplate:
        """Return the template of a conversation.

        Raises:
            APIError: 400, there is no template, or an option does not fit the template.
        """
        template, source = self._template, options.chat_template
        if source is not None:
            named = getattr(self._tokenizer, "chat_template", None)
            if isinstance(named, Mapping):
                source = named.get(source, source)
            template = ChatTemplate(self._tokenizer, source)
        if template is None:
            raise APIError(
                "this model has no chat template, which messages require: use /v1/completions, or "
                "start the server with chat_template=, such as chatml",
                code="no_chat_template",
            )
        # Reject the arguments of `apply_chat_template` that are not variables of the template.
        reserved_names = sorted(options.variables.keys() & _RESERVED)
        if reserved_names:
            raise APIError(
                f"{reserved_names[0]!r} is not a variable of the template; use its own request "
                "field",
                param="chat_template_kwargs",
            )
        if options.documents and template.source is None and "documents" not in self._template_text:
            raise APIError(
                "documents are not supported by this model's chat template: put them into a "
                "message",
                param="documents",
                code="unsupported_value",
            )
        return template

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        options: ConversationOptions,
        group: JobGroup | None = None,
    ) -> RenderedText:
        """Render a conversation with the template of `choose_template`.

        Args:
            group: can cancel the rendering of a template of the request.

        Raises:
            APIError: 400, the conversation is too long, or the template rejects it.
        """
        texts = [message.for_template() for message in messages]
        if self._volatile_lines:
            move_volatile_lines(texts, self._volatile_lines)
        offered: dict[str, Any] = {}
        if options.tools:
            offered["tools"] = [tool.for_template() for tool in options.tools]
        if options.documents:
            offered["documents"] = list(options.documents)
        characters = sum(map(len, texts_in((texts, offered))))
        self._check_length(characters, "messages")
        _check_repetition(options.variables, len(texts))
        render_options: dict[str, Any] = {
            **offered,
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
            **options.variables,
        }
        try:
            if options.chat_template is None:
                with RENDER_TIMER.limit(characters):
                    text, marks = template.render(texts, **render_options)
            else:
                source = template.source or ""
                text, marks = self._render_apart(source, texts, render_options, group)
        except APIError:
            raise
        except TemplateTimeError as error:
            self.is_slow = True
            raise APIError(f"the chat template failed: {error}", param="messages") from None
        except Exception as error:  # a template can raise any exception for a client's messages
            raise APIError(
                f"the chat template rejects these messages: {error}", param="messages"
            ) from error
        self._check_length(len(text), "messages")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise APIError(
                f"the messages are not valid Unicode: {error.reason}", param="messages"
            ) from error
        return text, marks

    def _render_apart(
        self,
        source: str,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        group: JobGroup | None,
    ) -> tuple[str, re.Pattern[str]]:
        try:
            return self._untrusted.render(source, messages, options, self._most, group)
        except TooLongTextError as error:
            self._check_length(error.characters, "messages")
            raise
        except UntrustedTemplateError as error:
            raise APIError(
                f"the chat template rejects these messages: {error}", param="messages"
            ) from None


def move_volatile_lines(
    messages: Sequence[dict[str, Any]], patterns: Sequence[Callable[[str], bool]]
) -> None:
    """Move lines of system messages to the end of the last message that the model does not write.

    A conversation in which no message follows a system message remains.

    Args:
        messages: messages for the template, which are changed.
        patterns: functions that find a pattern in a line.
    """
    ends = [
        place
        for place, message in enumerate(messages)
        if message["role"] not in (*_SYSTEM_ROLES, "assistant")
    ]
    moved: list[str] = []
    for message in messages[: ends[-1]] if ends else ():
        if message["role"] not in _SYSTEM_ROLES:
            continue
        for part, key in _get_texts(message):
            stable: list[str] = []
            for line in part[key].split("\n"):
                (moved if any(finds(line) for finds in patterns) else stable).append(line)
            part[key] = "\n".join(stable)
    if not moved:
        return
    last = messages[ends[-1]]
    content = last.get("content")
    if isinstance(content, list):
        last["content"] = [*content, {"type": "text", "text": "\n".join(moved)}]
    else:
        last["content"] = "\n".join([content, *moved] if content else moved)


def _get_texts(message: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the objects with a text of a message, each with the key of the text."""
    content = message.get("content")
    if isinstance(content, str):
        return [(message, "content")]
    return [(part, "text") for part in content or () if part.get("type") == "text"]


def _check_repetition(variables: Mapping[str, Any], messages: int) -> None:
    """Check the size of the variables, which a template may write once for each message.

    Raises:
        APIError: 400.
    """
    size = sum(map(len, texts_in(variables)))
    if size * messages > MAX_REPEATED:
        raise APIError(
            f"chat_template_kwargs has {size} characters, and the template may repeat them in each "
            f"of the {messages} messages: send at most {MAX_REPEATED // messages} characters, or "
            "put the text into a message",
            param="chat_template_kwargs",
        )


_SYSTEM_ROLES = ("system", "developer")
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
