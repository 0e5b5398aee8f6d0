"""What may end a request before its work is done: the client, the clock, the server's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.scope import Receive

T = TypeVar("T")


class Watch:
    """Watches over one request.

    Args:
        receive: of ASGI; tells of the client's leaving.
        stopping: set when the server waits no longer for what runs.
        seconds: from now, after which the request is given up.
    """

    def __init__(self, receive: Receive, stopping: asyncio.Event, seconds: float) -> None:
        self._receive, self._stopping, self._seconds = receive, stopping, seconds
        self._deadline = asyncio.get_running_loop().time() + seconds

    async def over(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, which is cancelled if something ends the request before.

        Returns:
            None if the client went away.

        Raises:
            APIError: 408 after the given time, 503 when the server stops.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(_disconnected(self._receive))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            left = self._deadline - asyncio.get_running_loop().time()
            waiting = {task, gone, stopped}
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
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
                f"the request was not answered within {self._seconds:g} seconds, which is this "
                "server's limit: ask for fewer tokens",
                status=408,
                code="request_timeout",
            )
        finally:
            for each in (task, gone, stopped):
                each.cancel()
            await asyncio.gather(task, gone, stopped, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
