"""`POST /v1/messages` and its token count: a conversation as Anthropic's clients hold it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ed_esurge.outputs import CompletionOutput
from ed_esurge.replies.blocks import Block, Blocks, Change
from ed_esurge.server.generation.conversation import Turn
from ed_esurge.server.generation.models import Served
from ed_esurge.server.http.errors import APIError, client_gone, renamed
from ed_esurge.server.http.streaming import answer, named, respond, truncation
from ed_esurge.server.http.threads import aside, size_of
from ed_esurge.server.messages.request import NAMES, CountRequest, MessagesRequest

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def message(served: Served, body: MessagesRequest, request: Request) -> Response:
    """Answer one request.

    Raises:
        APIError: see `Turn.begin`.
    """
    with renamed(NAMES):
        turn = await Turn.begin(served, await aside(body.chat, size_of(request)), request, "msg")
    if body.stream:
        return await respond(turn.watch, _events(turn), turn.headers, error_event=_error_event)

    async def gather() -> dict[str, Any]:
        blocks, stop = Blocks(), _stop(None, None)
        async with aclosing(turn.pieces()) as items:
            async for pieces in items:
                for piece in pieces:
                    blocks.take(piece.events)
                    if piece.finish is not None:
                        stop = _stop(piece.finish, piece.out)
        blocks.end()
        return {**_head(turn), "content": [_block(one) for one in blocks.whole], **stop}

    whole = await turn.watch.over(gather())
    if whole is None:
        return client_gone()
    return answer({**whole, "usage": _usage(turn)}, turn.headers)


async def count_tokens(served: Served, body: CountRequest, request: Request) -> Response:
    """How many tokens a prompt has.

    Raises:
        APIError: the template refuses the conversation, or the model is not this one.
    """
    with renamed(NAMES):
        chat = await aside(body.chat, size_of(request))
        served.formats.check(chat)
        return JSONResponse(
            {"input_tokens": len(await served.prompts.chat(chat, size_of(request)))}
        )


def _head(turn: Turn) -> dict[str, Any]:
    name = turn.served.name
    return {"id": turn.request_id, "type": "message", "role": "assistant", "model": name}


def _stop(finish: str | None, out: CompletionOutput | None) -> dict[str, Any]:
    """Why a reply ended."""
    found = out.stop_reason if out is not None and finish == "stop" else None
    if isinstance(found, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    return {"stop_reason": REASONS.get(finish or ""), "stop_sequence": None}


def _usage(turn: Turn) -> dict[str, int]:
    cached = turn.tally.cached_tokens
    return {
        "input_tokens": turn.tally.prompt_tokens - cached,
        "output_tokens": turn.tally.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        **truncation(turn.tally.truncated_tokens),
    }


def _block(block: Block) -> dict[str, Any]:
    """A whole block. Arguments that were cut short are no object, and left out."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = json.loads(block.text) if block.whole else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


_DELTAS = {
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(change: Change) -> str:
    block, index = change.block, {"index": change.block.index}
    if change.what == "closes":
        return named("content_block_stop", {"type": "content_block_stop", **index})
    if change.what == "opens":
        empty = _block(Block(block.index, block.kind, "", block.call_id, block.name, whole=False))
        fields = {"type": "content_block_start", **index, "content_block": empty}
        return named("content_block_start", fields)
    kind, key = _DELTAS[block.kind]
    delta = {"type": kind, key: change.text}
    return named("content_block_delta", {"type": "content_block_delta", **index, "delta": delta})


def _error_event(error: APIError) -> str:
    return named("error", error.anthropic_envelope())


async def _events(turn: Turn) -> AsyncGenerator[str]:
    blocks, begun = Blocks(), False
    stop = _stop(None, None)
    async with aclosing(turn.pieces()) as items:
        async for pieces in items:
            events = []
            if not begun:
                begun = True
                usage = {**_usage(turn), "output_tokens": 0}
                first = {**_head(turn), "content": [], **stop, "usage": usage}
                events.append(named("message_start", {"type": "message_start", "message": first}))
            for piece in pieces:
                changes = blocks.take(piece.events)
                if piece.finish is not None:
                    changes += blocks.end()
                    stop = _stop(piece.finish, piece.out)
                events += [_event(change) for change in changes]
            if events:
                yield "".join(events)
    last = {"type": "message_delta", "delta": stop, "usage": _usage(turn)}
    yield named("message_delta", last) + named("message_stop", {"type": "message_stop"})
