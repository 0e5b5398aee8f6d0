"""`POST /v1/responses`, and `GET` and `DELETE /v1/responses/{response_id}`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ed_esurge.replies.blocks import Blocks, Change
from ed_esurge.server.generation.conversation import Turn
from ed_esurge.server.generation.models import Served
from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.errors import APIError, client_gone, renamed
from ed_esurge.server.http.streaming import answer, named, respond
from ed_esurge.server.http.threads import aside, size_of
from ed_esurge.server.responses.answer import Events, base, item, status_of, usage
from ed_esurge.server.responses.request import NAMES, ResponseRequest


class _Response:
    """A response that is being made.

    Attributes:
        fields: of the response so far.
    """

    def __init__(self, turn: Turn, body: ResponseRequest, before: list[dict[str, Any]]) -> None:
        self._turn, self._body, self._before = turn, body, before
        self.fields = base(turn, body)
        self._blocks, self._finish = Blocks(), None

    async def changes(self) -> AsyncGenerator[list[tuple[Change, str | None]]]:
        """What happens to its items, step by step, each with the reason of the end, if it is."""
        async with aclosing(self._turn.pieces()) as items:
            async for pieces in items:
                changes: list[tuple[Change, str | None]] = []
                for piece in pieces:
                    changes += [(change, None) for change in self._blocks.take(piece.events)]
                    if piece.finish is not None:
                        self._finish = piece.finish
                        changes += [(change, piece.finish) for change in self._blocks.end()]
                yield changes

    async def end(self) -> dict[str, Any]:
        """The whole response, which is kept if it is to be."""
        turn, blocks, cut = self._turn, self._blocks.whole, self._finish == "length"
        thoughts = "".join(block.text for block in blocks if block.kind == "thoughts")
        encoded = [[]]
        if thoughts:
            encoded = await turn.served.prompts.encode([thoughts], add_special_tokens=False)
        last = blocks[-1] if blocks else None
        output = [
            item(block, status_of(block, self._finish if block is last else None))
            for block in blocks
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
            follows = ResponseRequest(input=sent).messages() if sent else []  # type: ignore[arg-type]
            messages = [*self._before, *self._body.messages(), *follows]
            turn.served.state.responses.put(self.fields, messages, turn.served.owner)
        return self.fields


async def create(served: Served, body: ResponseRequest, request: Request) -> Response:
    """Answer one request.

    Raises:
        APIError: 404, the response that it follows is not kept; else see `Turn.begin`.
    """
    before: list[dict[str, Any]] = []
    length = 0
    if body.previous_response_id is not None:
        known = served.state.responses.get(
            body.previous_response_id, served.owner, param="previous_response_id"
        )
        before, length = known.messages, known.size
    with renamed(NAMES):
        chat = await aside(partial(body.chat, before), size_of(request) + length)
        turn = await Turn.begin(served, chat, request, "resp")
    response = _Response(turn, body, before)
    if body.stream:
        return await respond(turn.watch, _events(response), turn.headers, error_event=_error_event)

    async def gather() -> dict[str, Any]:
        async with aclosing(response.changes()) as items:
            async for _ in items:
                pass
        return await response.end()

    whole = await turn.watch.over(gather())
    return client_gone() if whole is None else answer(whole, turn.headers)


def _error_event(error: APIError) -> str:
    return named("error", {"type": "error", **error.envelope()})


async def _events(response: _Response) -> AsyncGenerator[str]:
    write = Events()
    begun = False
    async with aclosing(response.changes()) as items:
        async for changes in items:
            events = []
            if not begun:
                begun = True
                for kind in ("response.created", "response.in_progress"):
                    events.append(write.event(kind, response=response.fields))
            events += [write.changed(change, finish) for change, finish in changes]
            if events:
                yield "".join(events)
    fields = await response.end()
    yield write.event(f"response.{fields['status']}", response=fields)


async def retrieve(site: Site, request: Request) -> Response:
    """Return a stored response. Raises APIError: 404."""
    name, owner = request.path_params["response_id"], owner_of(request.scope)
    return JSONResponse(site.state.responses.get(name, owner).response)


async def delete(site: Site, request: Request) -> Response:
    """Delete a stored response. Raises APIError: 404."""
    name = request.path_params["response_id"]
    site.state.responses.delete(name, owner_of(request.scope))
    return JSONResponse({"id": name, "object": "response", "deleted": True})
