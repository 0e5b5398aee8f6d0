"""Answers of Anthropic's API, as models: for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from ed_esurge.server.generation.answers import Answer


class AnsweredBlock(Answer):
    """A block: `text`; `thinking` with its `signature`; or `tool_use` with the other three."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessagesUsage(Answer):
    """Token counts; those read from the prefix cache are not among the input's."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    truncated_tokens: int | None = None
    """Tokens that were cut off the prompt (extension)."""


class AnthropicAnswer(Answer):
    """Answer of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class AnthropicErrorBody(Answer):
    """The class of an error, what to do, and this server's own code of the error."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicError(Answer):
    """Anthropic's error envelope."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


class TokenCount(Answer):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int
