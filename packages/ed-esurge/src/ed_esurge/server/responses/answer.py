"""What `/v1/responses` answers: the response, its items, and the events of a stream."""

from __future__ import annotations

import time
from typing import Any, Literal

from ed_esurge.replies.blocks import Block, Change
from ed_esurge.server.generation.answers import Answer
from ed_esurge.server.generation.conversation import Turn
from ed_esurge.server.http.streaming import named, truncation
from ed_esurge.server.responses.request import NamedFunction, ResponseRequest


class ResponseAnswer(Answer):
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
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    user: str | None


class Deleted(Answer):
    """Answer of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"]
    deleted: bool


def base(turn: Turn, body: ResponseRequest) -> dict[str, Any]:
    """A response at its beginning."""
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
        "model": turn.served.name,
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


def usage(turn: Turn, reasoning: int) -> dict[str, Any]:
    """Token counts of a turn."""
    tally = turn.tally
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": tally.cached_tokens,
            **truncation(tally.truncated_tokens),
        },
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thoughts":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item of the output."""
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
    """The status of a closed block; the last one of a reply that was cut is incomplete."""
    cut = finish == "length" or not block.whole or block.broken
    return "incomplete" if cut else "completed"


class Events:
    """Writes the events of a stream, numbered."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, kind: str, **fields: Any) -> str:
        """One event."""
        self._number += 1
        return named(kind, {"type": kind, "sequence_number": self._number, **fields})

    def changed(self, change: Change, finish: str | None) -> str:
        """The events of a change; `finish` if it is the last of the reply."""
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
