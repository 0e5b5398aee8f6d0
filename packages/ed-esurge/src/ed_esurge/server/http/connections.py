"""Connections that uvicorn holds: how many, and how long a request may take to arrive."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.scope import WRITER, ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

# Files that the process needs besides its connections.
OTHER_FILES = 128


def most_connections(limits: ServerLimits) -> int:
    """As many as the options say and the process may have files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, files - OTHER_FILES))


def connection_class(limits: ServerLimits) -> type[asyncio.Protocol]:
    """Return uvicorn's h11 protocol with limits.

    uvicorn would prefer httptools where it is installed, which has no limit on header sizes.
    """
    most, seconds = most_connections(limits), limits.body_timeout

    class Connection(H11Protocol):
        """Closed at once beyond the limit, and when the head of a request does not arrive.

        uvicorn waits forever for the first bytes of a connection, and for the rest of a head.
        """

        _patience: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            app: ASGIApp = self.app

            async def with_writer(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["http_version"] == "1.1":
                    scope[WRITER] = self._write_chunk
                await app(scope, receive, send)

            self.app = with_writer

        async def _write_chunk(self, data: bytes) -> None:
            """Send a part of a body without length; between its head and its last part."""
            if self.flow.write_paused:
                await self.flow.drain()
            if data and self.cycle is not None and not self.cycle.disconnected:
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                logger.warning("more than %d connections: a new one is closed", most)
                transport.close()
                return
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait_for_head()
            else:
                self._forget()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            if self._patience is None:
                self._patience = self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            self._patience = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def _forget(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Connection
