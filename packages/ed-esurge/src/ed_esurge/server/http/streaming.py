"""Server-sent events and disconnects: how answers leave, and how gone clients are noticed.

Per token this costs one `json` call on the text and one write: chunks are assembled from parts
that are serialised once per request, never from models.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response

from ed_esurge.server.generation.choices import Tally
from ed_esurge.server.http.errors import APIError, client_gone
from ed_esurge.server.http.scope import WRITER, Receive, Scope, Send
from ed_esurge.server.http.watch import Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
#: The header of an answer to a prompt that was cut: the number of tokens that were cut off.
TRUNCATED = "X-Truncated-Prompt-Tokens"
# Seconds for the last event of a stream.
LAST_WORDS = 5.0

# `json.dumps(..., ensure_ascii=False)` would build an encoder on every call.
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Chunks:
    """Writes the chunks of one stream.

    Args:
        kind: the chunks' `object` (`text_completion`, `chat.completion.chunk`).
        usage: the client asked for token counts, so every chunk has a `usage` field.
        so_far: returns the token counts so far, for each chunk; None: only the last chunk has some.
    """

    def __init__(
        self,
        kind: str,
        request_id: str,
        model: str,
        created: int,
        *,
        usage: bool,
        so_far: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        fields = {"id": request_id, "object": kind, "created": created, "model": model}
        self._head = "data: " + encode(fields)[:-1] + ',"choices":['
        self._tail = ',"usage":null}\n\n' if usage else "}\n\n"
        self._so_far = so_far

    def choice(
        self, index: int, payload: str, logprobs: Any, finish: str | None, beside: str = ""
    ) -> str:
        """One chunk with one choice.

        Args:
            payload: JSON of the choice: `"text":"…"` or `"delta":{…}`.
            beside: JSON of the chunk: `,"prompt_token_ids":[…]`.
        """
        scores = "null" if logprobs is None else encode(logprobs)
        reason = "null" if finish is None else f'"{finish}"'
        tail = self._tail
        if self._so_far is not None:
            tail = f',"usage":{encode(self._so_far())}}}\n\n'
        return (
            f'{self._head}{{"index":{index},{payload},"logprobs":{scores},'
            f'"finish_reason":{reason}}}]{beside}{tail}'
        )

    def usage(self, usage: dict[str, Any]) -> str:
        """The last chunk of a stream with `include_usage`: no choices, all counts."""
        return f'{self._head}],"usage":{encode(usage)}}}\n\n'


def usage(tally: Tally, completion_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage` object.

    Args:
        completion_tokens: None: those of the tally.
    """
    generated = tally.completion_tokens if completion_tokens is None else completion_tokens
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": tally.prompt_tokens + generated,
        "prompt_tokens_details": {
            "cached_tokens": tally.cached_tokens,
            **truncation(tally.truncated_tokens),
        },
    }


def truncation(tokens: int) -> dict[str, int]:
    """The field that reports how many tokens of the prompt were cut off, where some were."""
    return {"truncated_tokens": tokens} if tokens else {}


def headers_of(request_id: str, truncated_tokens: int) -> dict[str, str]:
    """The headers that every generated answer has."""
    headers = {"X-Request-Id": request_id}
    if truncated_tokens:
        headers[TRUNCATED] = str(truncated_tokens)
    return headers


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Items of several streams as they come, each with the number of its stream.

    The first error ends all of them. Closing this iterator closes them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()

    async def pump(place: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((place, item, None))
            queue.put_nowait((place, None, None))
        except Exception as error:
            queue.put_nowait((place, None, error))

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            place, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def named(event: str, fields: dict[str, Any]) -> str:
    """A server-sent event with a name."""
    return f"event: {event}\ndata: {encode(fields)}\n\n"


async def respond(
    watch: Watch,
    events: AsyncGenerator[str],
    headers: Mapping[str, str],
    *,
    error_event: Callable[[APIError], str] | None = None,
) -> Response:
    """Answer with a stream of events.

    Args:
        headers: see `headers_of`.
        error_event: writes the last event of a stream that fails. None: the OpenAI envelope, and
            `[DONE]` after the last event.

    Waits for the first event before it sends a status: what fails before the first token is an
    HTTP error, as it would be without streaming.
    """
    try:
        first = await watch.over(anext(events))
    except BaseException:
        await events.aclose()
        raise
    if first is None:
        await events.aclose()
        return client_gone()
    return EventStream(first, events, watch, headers, error_event=error_event)


class EventStream(Response):
    """A response of server-sent events; a client that goes away closes `events` at once.

    (Starlette's StreamingResponse leaves a generator that is cut off while sending to the garbage
    collector, and the request would go on generating until that runs.)
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: str,
        events: AsyncGenerator[str],
        watch: Watch,
        headers: Mapping[str, str],
        *,
        error_event: Callable[[APIError], str] | None = None,
    ) -> None:
        self._error_event = error_event
        self.status_code = 200
        self.background = None
        self.body = b""
        self._first = first
        self._events = events
        self._watch = watch
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(text: str, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            await send(message)

        write = scope.get(WRITER)

        async def everything() -> bool:
            await body(self._first)
            async for event in self._events:
                if write is None:  # no connection of `ed_esurge.server.http.connections`
                    await body(event)
                else:
                    await write(event.encode())
            return True

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events):
            try:
                if await self._watch.over(everything()) is None:
                    return
                end = DONE if self._error_event is None else ""
            except Exception as error:  # too late for a status: the envelope is the last event
                if not isinstance(error, APIError):
                    logger.exception("a stream failed")
                    error = APIError("the server failed on this request", status=500)
                if self._error_event is not None:
                    end = self._error_event(error)
                else:
                    end = f"data: {encode(error.envelope())}\n\n{DONE}"
        # A client that has stopped reading does not get it; the connection is cut.
        async with asyncio.timeout(LAST_WORDS):
            await body(end, more=False)


def answer(body: dict[str, Any], headers: Mapping[str, str]) -> JSONResponse:
    """The answer without streaming."""
    return JSONResponse(body, headers=dict(headers))
