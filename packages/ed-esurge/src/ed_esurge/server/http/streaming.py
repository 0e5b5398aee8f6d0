"""Server-sent events, and the reasons that end a request early.

The cost per token is one `json` call for the text and one write. Chunks are joined from parts that
are serialized once per request, not from models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ed_esurge.server.http.errors import APIError, client_gone
from ed_esurge.server.http.json_parts import encode_json, to_bytes, write_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Key of the scope for a function that writes a part of a stream to the connection. `send` would
#: pass every token through all middleware and the protocol's state machine.
WRITER = "ed_esurge.write_chunk"
DONE = "data: [DONE]\n\n"
# Seconds to send the last event of a stream.
LAST_EVENT_SECONDS = 5.0
#: Prompts of one request that are started before other requests take turns.
_ITEMS_OF_A_TURN = 32

ErrorEvent = Callable[[APIError], str]
"""Writes the last event of a stream that fails."""


@dataclass(frozen=True)
class StreamFormat:
    """The format of a stream.

    Attributes:
        error_event: None = the OpenAI error envelope, and `[DONE]` after the last event.
    """

    error_event: ErrorEvent | None = None
    media_type: str = "text/event-stream"


OPENAI_STREAM = StreamFormat()


def named_event(event: str, fields: Mapping[str, Any]) -> str:
    """Return a server-sent event with a name."""
    return f"event: {event}\ndata: {encode_json(fields)}\n\n"


async def write_named_event(event: str, fields: Mapping[str, Any], size: int) -> str:
    """Return a server-sent event with a name; see `write_json` for `size`."""
    return f"event: {event}\ndata: {await write_text(fields, size)}\n\n"


class RequestLifetime:
    """The time in which a request is answered.

    Args:
        request: its `receive` reports the disconnect of the client.
        stopping: set when the server aborts the running requests.
        seconds: time limit from now.
    """

    def __init__(self, request: Request, stopping: asyncio.Event, seconds: float) -> None:
        self._receive, self._stopping, self._seconds = request.receive, stopping, seconds
        self._deadline = asyncio.get_running_loop().time() + seconds

    async def run(self, work: Awaitable[T]) -> T | None:
        """Await `work`. Cancel it when the request ends early.

        Returns:
            the result; None after a disconnect of the client.

        Raises:
            APIError: 408 after the time limit, 503 when the server stops.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(_wait_for_disconnect(self._receive))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            remaining_seconds = self._deadline - asyncio.get_running_loop().time()
            waiting = {task, gone, stopped}
            await asyncio.wait(
                waiting, timeout=remaining_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            if gone.done():
                return None
            if stopped.done():
                raise APIError(
                    "the server is stopping and could not finish this request",
                    status=503,
                    code="server_stopping",
                )
            raise APIError(
                f"the request was not answered within {self._seconds:g} seconds, the limit of "
                "this server: request fewer tokens",
                status=408,
                code="request_timeout",
            )
        finally:
            for future in (task, gone, stopped):
                future.cancel()
            await asyncio.gather(task, gone, stopped, return_exceptions=True)

    async def respond(
        self,
        events: AsyncGenerator[str],
        headers: Callable[[], Mapping[str, str]] = dict,
        form: StreamFormat = OPENAI_STREAM,
    ) -> Response:
        """Answer with a stream of events.

        The status is sent after the first event exists, so that an error before the first token
        has its own HTTP status.

        Args:
            headers: returns the headers, when the first event exists.
        """
        try:
            first = await self.run(anext(events))
        except BaseException:
            await events.aclose()
            raise
        if first is None:
            await events.aclose()
            return client_gone()
        return EventStream(first, events, self, headers(), form)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events that closes `events` when the client disconnects.

    Starlette's StreamingResponse does not close an interrupted generator, so the engine would
    continue to generate until the next garbage collection.
    """

    def __init__(
        self,
        first: str,
        events: AsyncGenerator[str],
        lifetime: RequestLifetime,
        headers: Mapping[str, str],
        form: StreamFormat = OPENAI_STREAM,
    ) -> None:
        self._error_event, self.media_type = form.error_event, form.media_type
        self.status_code = 200
        self.background = None
        self.body = b""
        self._first = first
        self._events = events
        self._lifetime = lifetime
        self.held: AsyncExitStack | None = None
        """Closed after the stream."""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held or AsyncExitStack():
            await self._send(scope, send)

    async def _send(self, scope: Scope, send: Send) -> None:
        async def body(text: str, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": to_bytes(text), "more_body": more}
            await send(message)

        write = scope.get(WRITER)

        async def everything() -> bool:
            await body(self._first)
            async for event in self._events:
                if write is None:  # another server than `http.connections`
                    await body(event)
                else:
                    await write(to_bytes(event))
            return True

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events):
            try:
                if await self._lifetime.run(everything()) is None:
                    return
                end = DONE if self._error_event is None else ""
            except Exception as error:  # the status has been sent: the error is the last event
                if not isinstance(error, APIError):
                    logger.exception("a stream failed")
                    error = APIError("the server failed on this request", status=500)
                if self._error_event is not None:
                    end = self._error_event(error)
                else:
                    end = f"data: {encode_json(error.envelope())}\n\n{DONE}"
        # The connection of a client that no longer reads is cut.
        async with asyncio.timeout(LAST_EVENT_SECONDS):
            await body(end, more=False)


async def take_turns(items: Iterable[T]) -> AsyncGenerator[T]:
    """Yield items, and let other requests run after every few items."""
    for count, item in enumerate(items, 1):
        yield item
        if count % _ITEMS_OF_A_TURN == 0:
            await asyncio.sleep(0)


async def run_in_turns(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run at once. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) async for one in take_turns(work)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge_streams(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of several streams as they arrive, each with the index of its stream.

    The first error ends all streams. Closing this iterator closes the streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((index, item, None))
            queue.put_nowait((index, None, None))
        except Exception as error:
            queue.put_nowait((index, None, error))

    tasks: list[asyncio.Task[None]] = []
    try:
        async for index, stream in take_turns(enumerate(streams)):
            tasks.append(asyncio.create_task(pump(index, stream)))
        running = len(tasks)
        while running:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
