"""`POST /v1/responses`, and `GET` and `DELETE /v1/responses/{response_id}`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ed_esurge.replies.blocks import Block, Change
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration, truncation
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.body import aside, size_of
from ed_esurge.server.http.errors import APIError, renamed
from ed_esurge.server.http.fields import validated
from ed_esurge.server.http.streaming import StreamFormat, named_event
from ed_esurge.server.responses.request import NAMES, NamedFunction, ResponseRequest
from ed_esurge.server.routing import READING, Endpoint, post


class ResponseAnswer(AnswerBody):
    """Answer of `POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    background: bool
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    user: str | None


class Deleted(AnswerBody):
    """Answer of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"]
    deleted: bool


def initial_fields(turn: ChatGeneration, body: ResponseRequest) -> dict[str, Any]:
    """Return the fields of a response before the first token."""
    choice = body.tool_choice
    named_tool = isinstance(choice, NamedFunction)
    form: dict[str, Any] = {"type": body.text.format.type}
    if form["type"] == "json_schema":
        form |= {"name": body.text.format.name, "schema": body.text.format.json_schema}
        form["strict"] = True
    return {
        "id": turn.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": turn.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "background": False,
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": form},
        "tool_choice": choice.model_dump() if named_tool else choice or "auto",
        "tools": [{"strict": None, **tool.model_dump()} for tool in body.tools],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def usage(turn: ChatGeneration, reasoning: int) -> dict[str, Any]:
    """Return the token counts.

    Args:
        reasoning: number of tokens of the thoughts.
    """
    counts = turn.generation
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": counts.cached_tokens,
            **truncation(counts.truncated_tokens),
        },
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thoughts":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def item(block: Block, status: str) -> dict[str, Any]:
    """Return a block as an item of the output."""
    if block.kind == "call":
        known = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", "id": f"fc_{block.id}", **known, "status": status}
    content = [] if status == "in_progress" else [_part(block)]
    if block.kind == "thoughts":
        known = {"id": f"rs_{block.id}", "summary": [], "content": content}
        return {"type": "reasoning", **known, "status": status}
    known = {"id": f"msg_{block.id}", "role": "assistant", "content": content}
    return {"type": "message", **known, "status": status}


def status_of(block: Block, finish: str | None) -> str:
    """Return the status of a closed block. The last block of a truncated reply is incomplete."""
    cut = finish == "length" or not block.whole or block.broken
    return "incomplete" if cut else "completed"


class Events:
    """Writes the numbered events of a stream."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, kind: str, **fields: object) -> str:
        """Return an event."""
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number, **fields})

    def changed(self, change: Change, finish: str | None) -> str:
        """Return the events of a change. `finish` is the finish reason at the end of the reply."""
        block = change.block
        opened = item(block, "in_progress")
        place = {"item_id": opened["id"], "output_index": block.index}
        inner = {**place, "content_index": 0}
        if change.what == "opens":
            added = self.event("response.output_item.added", output_index=block.index, item=opened)
            if block.kind == "call":
                return added
            part = {**_part(block), "text": ""}
            return added + self.event("response.content_part.added", **inner, part=part)
        kind, at = {
            "text": ("response.output_text", {**inner, "logprobs": []}),
            "thoughts": ("response.reasoning_text", inner),
            "call": ("response.function_call_arguments", place),
        }[block.kind]
        if change.what == "grows":
            return self.event(f"{kind}.delta", **at, delta=change.text)
        if block.kind == "call":
            done = self.event(f"{kind}.done", **at, arguments=block.text, name=block.name)
        else:
            done = self.event(f"{kind}.done", **at, text=block.text)
            done += self.event("response.content_part.done", **inner, part=_part(block))
        closed = item(block, status_of(block, finish))
        return done + self.event("response.output_item.done", output_index=block.index, item=closed)


class _Response:
    """A response in progress.

    Attributes:
        fields: the fields of the response so far.
    """

    def __init__(
        self, turn: ChatGeneration, body: ResponseRequest, before: list[dict[str, Any]]
    ) -> None:
        self.turn, self._body, self._before = turn, body, before
        self.fields = initial_fields(turn, body)

    async def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        await self.turn.finish()
        return await self.end()

    async def end(self) -> dict[str, Any]:
        """Return the complete response. Store the response if requested."""
        turn, blocks = self.turn, self.turn.blocks.whole
        finish = turn.last.finish if turn.last is not None else None
        cut = finish == "length"
        thoughts = "".join(block.text for block in blocks if block.kind == "thoughts")
        encoded = [[]]
        if thoughts:
            encoded = await turn.model.prompts.encode([thoughts], add_special_tokens=False)
        last = blocks[-1] if blocks else None
        output = [
            item(block, status_of(block, finish if block is last else None)) for block in blocks
        ]
        self.fields |= {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage(turn, len(encoded[0])),
        }
        if self._body.store:
            sent = [
                one
                for one in output
                if one["status"] == "completed" or one["type"] != "function_call"
            ]
            follows = validated(ResponseRequest, {"input": sent}).messages() if sent else []
            messages = [*self._before, *self._body.messages(), *follows]
            turn.model.state.responses.put(self.fields, messages, turn.model.owner)
        return self.fields

    async def events(self) -> AsyncGenerator[str]:
        """Yield the events of a stream."""
        write = Events()
        begun = False
        async with aclosing(self.turn.changes()) as items:
            async for changes in items:
                events = []
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        events.append(write.event(kind, response=self.fields))
                events += [write.changed(change, finish) for change, finish in changes]
                if events:
                    yield "".join(events)
        fields = await self.end()
        yield write.event(f"response.{fields['status']}", response=fields)


async def create(model: ServedModel, body: ResponseRequest, request: Request) -> Response:
    """Answer a response request.

    Raises:
        APIError: 404, the previous response is not stored; otherwise see `ChatGeneration.begin`.
    """
    before: list[dict[str, Any]] = []
    length = 0
    if body.previous_response_id is not None:
        known = model.state.responses.get(
            body.previous_response_id, model.owner, param="previous_response_id"
        )
        before, length = known.messages, known.size
    with renamed(NAMES):
        chat = await aside(partial(body.chat, before), size_of(request) + length)
        turn = await ChatGeneration.begin(model, chat, request, "resp")
    response = _Response(turn, body, before)
    return await turn.generation.answer(
        body.stream, response.events, response.whole, StreamFormat(_error_event)
    )


def _error_event(error: APIError) -> str:
    return named_event("error", {"type": "error", **error.envelope()})


async def retrieve(server: ServedModels, request: Request) -> Response:
    """Return a stored response. Raises APIError: 404."""
    name, owner = request.path_params["response_id"], owner_of(request.scope)
    return JSONResponse(server.state.responses.get(name, owner).response)


async def delete(server: ServedModels, request: Request) -> Response:
    """Delete a stored response. Raises APIError: 404."""
    name = request.path_params["response_id"]
    server.state.responses.delete(name, owner_of(request.scope))
    return JSONResponse({"id": name, "object": "response", "deleted": True})


ENDPOINTS = (
    post(
        "/v1/responses",
        "Answer an input. The response can be stored, and continued by a later request.",
        create,
        ResponseRequest,
        ResponseAnswer,
        streams=True,
        batched=True,
        ability=GENERATES,
    ),
    Endpoint(
        "/v1/responses/{response_id}",
        "Return a stored response.",
        retrieve,
        ResponseAnswer,
        refusals=(*READING, 404),
    ),
    Endpoint(
        "/v1/responses/{response_id}",
        "Delete a stored response.",
        delete,
        Deleted,
        refusals=(*READING, 404),
        method="DELETE",
    ),
)
