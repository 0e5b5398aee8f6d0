"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.outputs import CompletionOutput
from ed_esurge.replies.events import (
    CallArguments,
    CallBegins,
    Event,
    Reasoning,
    ReplyCall,
    ReplyText,
)
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import ChatCompletion
from ed_esurge.server.generation.logprobs import (
    chat_logprobs,
    prompt_logprobs,
    written_chat_logprobs,
)
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration, FinishedChoice, openai_usage
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.http.json_parts import JsonItems, encode_json
from ed_esurge.server.openai.chunks import Chunks
from ed_esurge.server.routing import post

ROLE = '"delta":{"role":"assistant","content":""}'


async def _chat(model: ServedModel, body: ChatRequest, request: Request) -> Response:
    """Answer a chat request.

    Raises:
        APIError: see `ChatGeneration.begin`.
    """
    turn = await ChatGeneration.begin(model, body, request, "chatcmpl")
    return await turn.generation.answer(
        body.stream, lambda: _events(turn), lambda: _build_response(turn)
    )


async def _build_response(turn: ChatGeneration) -> dict[str, Any]:
    model, body = turn.model, turn.body
    choices = await turn.choices()
    completion = {
        "id": turn.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": JsonItems(lambda: (_choice(model, body, one) for one in choices), group=0),
        "usage": openai_usage(turn.generation),
    }
    if body.prompt_logprobs is not None:
        completion["prompt_logprobs"] = prompt_logprobs(
            model.texts, turn.prompt_logprobs, body.prompt_logprobs
        )
    if body.return_token_ids:
        completion["prompt_token_ids"] = turn.tokens
    return completion


def _choice(model: ServedModel, body: ChatRequest, choice: FinishedChoice) -> dict[str, Any]:
    reply, out = choice.reply, choice.out
    calls = [_call(call) for call in reply.calls.values()]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not reply.content else reply.content,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    entry = {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(model, body, out, written_chat_logprobs),
        "finish_reason": choice.finish,
    }
    if body.return_token_ids:
        entry["token_ids"] = out.token_ids
    return entry


def _call(call: ReplyCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(
    model: ServedModel,
    body: ChatRequest,
    out: CompletionOutput,
    create: Callable[..., dict[str, Any]] = chat_logprobs,
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return create(model.texts_for(body), out.token_ids, out.logprobs or [], body.top_logprobs or 0)


def _deltas(events: Sequence[Event]) -> list[str]:
    """Return the `delta` of each chunk for some events, as JSON."""
    if len(events) == 1 and isinstance(events[0], ReplyText):  # the most frequent case
        return [f'{{"content":{encode_json(events[0].text)}}}']
    fields: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ReplyText(text=text):
                fields.append(("content", text))
            case Reasoning(text):
                fields.append(("reasoning_content", text))
            case CallBegins(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                fields.append(("", f'{{"tool_calls":[{encode_json(call)}]}}'))
            case CallArguments(index, text):
                fields.append((str(index), text))
            case _:
                pass
    joined: list[tuple[str, str]] = []
    for name, text in fields:
        if name and joined and joined[-1][0] == name:
            text = joined.pop()[1] + text
        joined.append((name, text))
    result = []
    for name, text in joined:
        if not name:
            result.append(text)
        elif name.isdecimal():
            part = f'{{"index":{name},"function":{{"arguments":{encode_json(text)}}}}}'
            result.append(f'{{"tool_calls":[{part}]}}')
        else:
            result.append(f'{{"{name}":{encode_json(text)}}}')
    return result


async def _events(turn: ChatGeneration) -> AsyncGenerator[str]:
    """Yield the chunks of a stream: the role, the new text, an empty delta with the reason."""
    model, body = turn.model, turn.body
    chunks = Chunks(
        "chat.completion.chunk",
        turn.request_id,
        model.name,
        int(time.time()),
        usage=body.include_usage,
        so_far=(lambda: openai_usage(turn.generation)) if body.continuous_usage else None,
    )
    begun: set[int] = set()
    prompt = f',"prompt_token_ids":{encode_json(turn.tokens)}' if body.return_token_ids else ""
    async with aclosing(turn.pieces()) as items:
        async for pieces in items:
            events = []
            for piece in pieces:
                out = piece.out
                if piece.index not in begun:
                    begun.add(piece.index)
                    events.append(chunks.choice(piece.index, ROLE, None, None, prompt))
                    prompt = ""
                logprobs = _logprobs(model, body, out) if out.token_ids else None
                ids = f',"token_ids":{encode_json(out.token_ids)}' if body.return_token_ids else ""
                deltas = _deltas(piece.events)
                if not deltas and (logprobs is not None or (ids and out.token_ids)):
                    deltas = ['{"content":""}']
                for delta in deltas:
                    events.append(
                        chunks.choice(piece.index, f'"delta":{delta}{ids}', logprobs, None)
                    )
                    logprobs, ids = None, ""
                if piece.finish is not None:
                    events.append(chunks.choice(piece.index, '"delta":{}', None, piece.finish))
            if events:
                yield "".join(events)
    if body.include_usage:
        yield chunks.usage(openai_usage(turn.generation))


ENDPOINTS = (
    post(
        "/v1/chat/completions",
        "Answer a conversation.",
        _chat,
        ChatRequest,
        ChatCompletion,
        streams=True,
        batched=True,
        ability=GENERATES,
    ),
)
