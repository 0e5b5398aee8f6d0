"""`POST /api/chat`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.frontends.library.definitions import add_only_messages
from ed_esurge.frontends.ollama.replies import (
    LINES,
    ReplyLine,
    Stopwatch,
    TimedAnswer,
    head,
    json_line,
    reply_lines,
    whole_reply,
)
from ed_esurge.frontends.ollama.requests import (
    OLLAMA_NAMES,
    OllamaMessages,
    OllamaRequest,
    chat_messages,
    keep_model,
)
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration
from ed_esurge.server.generation.structured import Tools
from ed_esurge.server.http.errors import rename_fields
from ed_esurge.server.routing import post


class OllamaChatRequest(OllamaRequest):
    """Body of `POST /api/chat`. Without messages, the model is only loaded."""

    messages: OllamaMessages = Field(default_factory=list)
    tools: Tools = Field(default_factory=list)


class ChatAnswerMessage(AnswerBody):
    """The assistant's message, or its new part."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatAnswer(TimedAnswer):
    """Answer of `POST /api/chat`, or a line of its stream."""

    message: ChatAnswerMessage


async def _chat(model: ServedModel, body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation.

    Raises:
        APIError: see `ChatGeneration.begin`.
    """
    watch = Stopwatch(model)
    keep_model(model, body.keep_alive, request)
    if not body.messages:
        reason = "unload" if body.keep_alive == 0 else "load"
        empty = {"message": _message(ReplyLine()), "done": True, "done_reason": reason}
        return JSONResponse({**head(model), **empty, **watch.durations()})
    with rename_fields(OLLAMA_NAMES):
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        chat_request = body.chat(model, chat_messages(body.messages), tools=tools)
        turn = await ChatGeneration.begin(
            add_only_messages(model),
            chat_request,
            request,
            "ollama",
            context=body.sampling(model).get("num_ctx"),
            stores=True,
        )

    async def build_response() -> dict[str, Any]:
        reply = await whole_reply(turn)
        logprobs = {"logprobs": reply.logprobs} if body.logprobs else {}
        last = watch.last(turn, reply.finish)
        return {**head(model), "message": _message(reply), **logprobs, **last}

    async def events() -> AsyncGenerator[str]:
        async with aclosing(reply_lines(turn)) as lines:
            async for line in lines:
                logprobs = {"logprobs": line.logprobs} if line.logprobs else {}
                if line.content or line.thinking or line.calls or logprobs:
                    fields = {"message": _message(line), "done": False, **logprobs}
                    yield json_line({**head(model), **fields})
                if line.finish is not None:
                    last = {"message": _message(ReplyLine()), **watch.last(turn, line.finish)}
                    yield json_line({**head(model), **last})

    return await turn.generation.answer(body.stream, events, build_response, LINES)


def _message(line: ReplyLine) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": line.content}
    if line.thinking:
        message["thinking"] = line.thinking
    if line.calls:
        message["tool_calls"] = line.calls
    return message


ENDPOINTS = (
    post(
        "/api/chat",
        "Answer a conversation in the format of Ollama's API.",
        _chat,
        OllamaChatRequest,
        OllamaChatAnswer,
        streams=True,
        ability=GENERATES,
    ),
)
