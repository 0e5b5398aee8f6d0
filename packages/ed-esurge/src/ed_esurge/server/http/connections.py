"""Limits of uvicorn's connections: their number, and the time for the head of a request."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.streaming import WRITER

logger = logging.getLogger(__name__)

# File descriptors of the process for other purposes than connections.
OTHER_FILES = 128


def most_connections(limits: ServerLimits) -> int:
    """Return the limit of the options, or that of the process's file descriptors if lower."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, files - OTHER_FILES))


def connection_class(limits: ServerLimits) -> type[asyncio.Protocol]:
    """Return uvicorn's h11 protocol with limits.

    By default, uvicorn uses httptools if installed, which does not limit the size of headers.
    """
    most, seconds = most_connections(limits), limits.body_timeout

    class Connection(H11Protocol):
        """A connection that is closed if there are too many, or if a head does not arrive in time.

        uvicorn itself has no time limit for the head of a request.
        """

        _timer: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            app: ASGIApp = self.app

            async def with_writer(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["http_version"] == "1.1":
                    scope[WRITER] = self._write_chunk
                await app(scope, receive, send)

            self.app = with_writer

        async def _write_chunk(self, data: bytes) -> None:
            """Write a chunk of a body with chunked encoding, after the head of the response."""
            if self.flow.write_paused:
                await self.flow.drain()
            if data and self.cycle is not None and not self.cycle.disconnected:
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                logger.warning("closed a connection: there are more than %d connections", most)
                transport.close()
                return
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait_for_head()
            else:
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(seconds, self._close_idle)

        def _close_idle(self) -> None:
            self._timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection
