"""The routes below `/v1/responses`: create, retrieve, delete, cancel, input items, token count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, Literal

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.server.detached import DetachedAnswer
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import answer_headers
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.admission import RESERVATION
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.body import aside
from ed_esurge.server.http.errors import APIError, rename_fields
from ed_esurge.server.http.json_parts import LONG_ANSWER, JsonPieces, write_json
from ed_esurge.server.http.streaming import (
    RequestLifetime,
    StreamFormat,
    named_event,
    write_named_event,
)
from ed_esurge.server.responses.output import EventWriter
from ed_esurge.server.responses.request import RESPONSE_NAMES, PromptFields, ResponseRequest
from ed_esurge.server.responses.run import ResponsePrompt, ResponseRun
from ed_esurge.server.routing import LISTING, READING, REFUSALS, Endpoint, post
from ed_esurge.server.stores import StoredResponse

logger = logging.getLogger(__name__)

#: Limit and default of the items of a page of `input_items`.
MAX_PAGE, PAGE = 100, 20


class ResponseAnswer(AnswerBody):
    """Answer of `POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "queued", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
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
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    user: str | None


class Deleted(AnswerBody):
    """Answer of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(AnswerBody):
    """Answer of `GET /v1/responses/{response_id}/input_items`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseTokenCount(AnswerBody):
    """Answer of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


async def _stream(run: ResponseRun) -> AsyncGenerator[str]:
    writer = EventWriter()
    async with aclosing(run.events()) as items:
        async for new in items:
            yield "".join([await writer.write_long(fields, run.size) for fields in new])


async def _create_response(model: ServedModel, body: ResponseRequest, request: Request) -> Response:
    """Answer a response request.

    Raises:
        APIError: 404, the previous response is not stored; 429, too many background responses;
            otherwise see `ChatGeneration.begin`.
    """
    if body.background:
        return await _start_background_response(model, body, request)
    run = await ResponseRun.begin(model, body, request)
    return await run.turn.generation.answer(
        body.stream,
        lambda: _stream(run),
        run.build_response,
        StreamFormat(_error_event),
        size=lambda: run.size,
    )


async def _start_background_response(
    model: ServedModel, body: ResponseRequest, request: Request
) -> Response:
    """Begin a response that does not depend on the connection."""
    state = model.state
    # The bytes of the request and the response are in flight until the work ends.
    with state.detached.claim(model.owner) as place:
        reservation = state.reservation(request).move()
        place.callback(reservation.close)
        scope = {**request.scope, RESERVATION: reservation}
        run = await ResponseRun.begin(model, body, Request(scope, request.receive))
        answer = DetachedAnswer()
        run.fields["status"] = "queued"
        run.open(answer)
        queued = dict(run.fields)
        state.detached.start(answer, _work(model, body, run, answer), place.pop_all())
    headers = answer_headers(run.turn.request_id, run.turn.generation.truncated_tokens)
    if not body.stream:
        return JSONResponse(queued, headers=headers)
    return await model.lifetime(request).respond(
        answer.follow(-1), lambda: headers, StreamFormat(_error_event)
    )


def _work(
    model: ServedModel, body: ResponseRequest, run: ResponseRun, answer: DetachedAnswer
) -> Callable[[], Awaitable[None]]:
    """Return the work of a background response."""
    state = model.state

    async def generate() -> None:
        writer = EventWriter()
        run.fields["status"] = "in_progress"
        async with aclosing(run.events()) as items:
            async for new in items:
                for fields in new:
                    answer.append(await writer.write_long(fields, run.size))

    async def work() -> None:
        stopping = asyncio.create_task(state.stopping.wait())
        task = asyncio.create_task(generate())
        try:
            seconds = state.limits.request_timeout
            done = {task, stopping}
            await asyncio.wait(done, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return
            reason = "the server is stopping" if stopping.done() else f"it took {seconds:g} s"
            _fail(run, "server_error", f"the response was not finished: {reason}")
        except APIError as error:
            _fail(run, error.code or "server_error", str(error))
        except asyncio.CancelledError:
            run.fields["status"] = "cancelled"
        except Exception:
            logger.exception("a background response failed")
            _fail(run, "server_error", "the server failed on this response")
        finally:
            stopping.cancel()
            task.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)
            await _end(run, answer)
            state.responses.recount(run.fields["id"], model.owner)

    async def work_with_model() -> None:
        with nullcontext() if model.activity is None else model.activity.using():
            await work()

    return work_with_model


def _fail(run: ResponseRun, code: str, message: str) -> None:
    run.fields |= {"status": "failed", "error": {"code": code, "message": message}}


async def _end(run: ResponseRun, answer: DetachedAnswer) -> None:
    """Append the last event of a response that failed or was cancelled, and store the response."""
    fields = run.fields
    if fields["status"] in ("failed", "cancelled"):
        output = [one for one in fields["output"] if one.get("status") != "in_progress"]
        fields["output"] = output
        kind = f"response.{fields['status']}"
        last = {"type": kind, "sequence_number": answer.count, "response": fields}
        await run.store()  # before the last event, after which clients continue the conversation
        answer.append(await write_named_event(kind, last, run.size))


def _error_event(error: APIError) -> str:
    return named_event("error", {"type": "error", **error.envelope()})


async def _count_tokens(model: ServedModel, body: PromptFields, request: Request) -> Response:
    """Return the number of tokens of a response's prompt.

    Raises:
        APIError: see `_create_response`.
    """
    with rename_fields(RESPONSE_NAMES):
        conversation = ResponsePrompt(model, body, request)
        chat = await conversation.chat(execute=False)
        model.formats.check(chat)
        prompt = await model.prompts.chat(chat, conversation.size)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """Return a number of the query. Raises APIError: 400."""
    text = query.get(name)
    if text is None:
        return default
    value = int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else None
    if value is None or not low <= value <= high:
        raise APIError(f"{text!r:.40} is not a number from {low} to {high}", param=name)
    return value


async def retrieve(server: ServedModels, request: Request) -> Response:
    """Return a stored response, or the stream of a background response.

    Raises:
        APIError: 400, the response has no stored stream; 404.
    """
    name, owner = request.path_params["response_id"], get_owner(request.scope)
    stored = server.state.responses.get(name, owner)
    if request.query_params.get("stream") != "true":
        return await _build_stored_response(stored)
    if stored.answer is None:
        raise APIError(
            "only responses with background: true have a stream that can be read again",
            param="stream",
        )
    starting_after = _number(request.query_params, "starting_after", -1, 0, 2**31)
    state = server.state
    lifetime = RequestLifetime(request, state.stopping, state.limits.request_timeout)
    if starting_after >= stored.answer.count - stored.answer.ended:
        raise APIError(f"the stream has no event after {starting_after}", param="starting_after")
    return await lifetime.respond(
        stored.answer.follow(starting_after), form=StreamFormat(_error_event)
    )


async def _delete_response(server: ServedModels, request: Request) -> Response:
    """Delete a stored response. A response in progress is cancelled. Raises APIError: 404."""
    name, owner = request.path_params["response_id"], get_owner(request.scope)
    answer = server.state.responses.get(name, owner).answer
    if answer is not None:
        await answer.cancel()
    server.state.responses.delete(name, owner)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


async def _cancel_response(server: ServedModels, request: Request) -> Response:
    """Cancel a background response. A finished response is returned unchanged.

    Raises:
        APIError: 400, the response is not a background response; 404.
    """
    name, owner = request.path_params["response_id"], get_owner(request.scope)
    stored = server.state.responses.get(name, owner)
    if stored.answer is None:
        raise APIError("only responses with background: true can be cancelled", param="response_id")
    await stored.answer.cancel()
    return await _build_stored_response(server.state.responses.get(name, owner))


async def _build_stored_response(stored: StoredResponse) -> Response:
    """Return the answer with a stored response."""
    if stored.live is None:
        return JsonPieces(stored.text)
    return JsonPieces(await write_json(stored.live, LONG_ANSWER))


async def input_items(server: ServedModels, request: Request) -> Response:
    """Return a page of the input items of a stored response.

    Raises:
        APIError: 400, an option of the query is invalid; 404.
    """
    name, owner = request.path_params["response_id"], get_owner(request.scope)
    query = request.query_params
    text = server.state.responses.get(name, owner).items
    items: list[dict[str, Any]] = await aside(partial(from_json, text), len(text))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise APIError(f"{order!r:.40} is not asc or desc", param="order")
    if order == "desc":
        items = items[::-1]
    after_id = query.get("after")
    if after_id is not None:
        ids = [item["id"] for item in items]
        if after_id not in ids:
            raise APIError(f"no input item has the id {after_id!r:.80}", param="after")
        items = items[ids.index(after_id) + 1 :]
    size = _number(query, "limit", PAGE, 1, MAX_PAGE)
    page = items[:size]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    fields = {
        "object": "list",
        "data": page,
        "first_id": first,
        "last_id": last,
        "has_more": len(items) > size,
    }
    return JsonPieces(await write_json(fields, len(text)))


_STORED = "/v1/responses/{response_id}"
ENDPOINTS = (
    post(
        "/v1/responses",
        "Answer an input. The response can be stored, and continued by a later request.",
        _create_response,
        ResponseRequest,
        ResponseAnswer,
        streams=True,
        batched=True,
        ability=GENERATES,
    ),
    post(
        "/v1/responses/input_tokens",
        "Count the tokens of a response's prompt.",
        _count_tokens,
        PromptFields,
        ResponseTokenCount,
        ability=GENERATES,
    ),
    Endpoint(
        _STORED,
        "Return a stored response, or the stream of a background response.",
        retrieve,
        ResponseAnswer,
        streams=True,
        error_statuses=LISTING,
    ),
    Endpoint(
        _STORED,
        "Delete a stored response.",
        _delete_response,
        Deleted,
        error_statuses=(*READING, 404),
        method="DELETE",
    ),
    Endpoint(
        f"{_STORED}/cancel",
        "Cancel a background response.",
        _cancel_response,
        ResponseAnswer,
        error_statuses=tuple(REFUSALS),
        method="POST",
    ),
    Endpoint(
        f"{_STORED}/input_items",
        "List the input items of a stored response.",
        input_items,
        InputItemList,
        error_statuses=LISTING,
    ),
)
