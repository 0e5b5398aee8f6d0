"""`POST /v1/messages` and `/v1/messages/count_tokens`, with the formats of Anthropic's API."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.replies.blocks import Block, Change
from ed_esurge.replies.json_text import loads_arguments
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration, ReplyPiece, truncation
from ed_esurge.server.http.body import aside, get_body_size
from ed_esurge.server.http.errors import APIError, ApiFormat, rename_fields
from ed_esurge.server.http.streaming import StreamFormat, named_event
from ed_esurge.server.messages.request import MESSAGE_NAMES, CountRequest, MessagesRequest
from ed_esurge.server.routing import post


class AnsweredBlock(AnswerBody):
    """A block: `text`, `thinking` with `signature`, or `tool_use` with `id`, `name`, `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessagesUsage(AnswerBody):
    """Token counts. `input_tokens` excludes the tokens read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    truncated_tokens: int | None = None
    """Number of tokens removed from the prompt (extension)."""


class AnthropicAnswer(AnswerBody):
    """Answer of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class AnthropicErrorBody(AnswerBody):
    """Type and message of an error. `details` contains the error code of this server."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicError(AnswerBody):
    """Anthropic's error envelope."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _build_error(error: APIError) -> dict[str, Any]:
    """Return an error in Anthropic's format: https://docs.anthropic.com/en/api/errors."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    content: dict[str, Any] = {
        "type": _ERROR_TYPES.get(error.status, kind),
        "message": error.full_message(),
    }
    if error.code is not None:
        content["details"] = {"error_code": error.code}
    return {"type": "error", "error": content}


def _write_error(error: APIError) -> tuple[dict[str, Any], dict[str, str]]:
    request_id = f"req_{uuid.uuid4().hex}"
    return {**_build_error(error), "request_id": request_id}, {"Request-Id": request_id}


ANTHROPIC = ApiFormat(re.compile("/v1/messages(/|$)"), AnthropicError, _write_error)


class InputTokenCount(AnswerBody):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def message(model: ServedModel, body: MessagesRequest, request: Request) -> Response:
    """Answer a message request.

    Raises:
        APIError: see `ChatGeneration.begin`.
    """
    with rename_fields(MESSAGE_NAMES):
        chat = await aside(body.chat, get_body_size(request))
        turn = await ChatGeneration.begin(model, chat, request, "msg")
    return await turn.generation.answer(
        body.stream,
        lambda: _events(turn),
        lambda: _build_response(turn),
        StreamFormat(_error_event),
    )


async def _build_response(turn: ChatGeneration) -> dict[str, Any]:
    await turn.finish()
    content = [_block(block) for block in turn.blocks.whole]
    return {**_head(turn), "content": content, **_stop(turn.last), "usage": _usage(turn)}


async def _count_tokens(model: ServedModel, body: CountRequest, request: Request) -> Response:
    """Return the number of prompt tokens of a request.

    Raises:
        APIError: the chat template rejects the conversation.
    """
    with rename_fields(MESSAGE_NAMES):
        chat = await aside(body.chat, get_body_size(request))
        model.formats.check(chat)
        prompt = await model.prompts.chat(chat, get_body_size(request))
    return JSONResponse({"input_tokens": len(prompt.tokens)})


def _head(turn: ChatGeneration) -> dict[str, Any]:
    name = turn.model.name
    return {"id": turn.request_id, "type": "message", "role": "assistant", "model": name}


def _stop(last: ReplyPiece | None) -> dict[str, Any]:
    """Return the fields that report why a reply ended; null before its end."""
    stop_reason = last.out.stop_reason if last is not None and last.finish == "stop" else None
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    reason = None if last is None else REASONS.get(last.finish or "")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(turn: ChatGeneration) -> dict[str, int]:
    counts = turn.generation
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        **truncation(counts.truncated_tokens),
    }


def _block(block: Block) -> dict[str, Any]:
    """Return a complete block. Arguments of a call that was cut off are not valid JSON: omit."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = loads_arguments(block.text) if block.is_complete else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


_DELTAS = {
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(change: Change) -> str:
    block, index = change.block, {"index": change.block.index}
    if change.kind == "closes":
        return named_event("content_block_stop", {"type": "content_block_stop", **index})
    if change.kind == "opens":
        empty = _block(
            Block(block.index, block.kind, "", block.call_id, block.name, is_complete=False)
        )
        fields = {"type": "content_block_start", **index, "content_block": empty}
        return named_event("content_block_start", fields)
    kind, key = _DELTAS[block.kind]
    delta = {"type": kind, key: change.text}
    return named_event(
        "content_block_delta", {"type": "content_block_delta", **index, "delta": delta}
    )


def _error_event(error: APIError) -> str:
    return named_event("error", _build_error(error))


async def _events(turn: ChatGeneration) -> AsyncGenerator[str]:
    begun = False
    async with aclosing(turn.changes()) as items:
        async for changes in items:
            events = []
            if not begun:
                begun = True
                usage = {**_usage(turn), "output_tokens": 0}
                first = {**_head(turn), "content": [], **_stop(None), "usage": usage}
                start = {"type": "message_start", "message": first}
                events.append(named_event("message_start", start))
            events += [_event(change) for change, _ in changes]
            if events:
                yield "".join(events)
    last = {"type": "message_delta", "delta": _stop(turn.last), "usage": _usage(turn)}
    yield named_event("message_delta", last) + named_event("message_stop", {"type": "message_stop"})


ENDPOINTS = (
    post(
        "/v1/messages",
        "Answer a conversation in the format of Anthropic's API.",
        message,
        MessagesRequest,
        AnthropicAnswer,
        streams=True,
        ability=GENERATES,
        api=ANTHROPIC,
    ),
    post(
        "/v1/messages/count_tokens",
        "Count the prompt tokens of such a conversation.",
        _count_tokens,
        CountRequest,
        InputTokenCount,
        api=ANTHROPIC,
    ),
)
