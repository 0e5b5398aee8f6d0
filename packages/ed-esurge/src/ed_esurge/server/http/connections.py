"""Limits of uvicorn's connections: their number, the time for the head of a request, and the rate
at which a client reads."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import socket
import struct
import sys
import termios
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.streaming import WRITER

logger = logging.getLogger(__name__)

# File descriptors of the process for other purposes than connections.
OTHER_FILES = 128
#: Seconds without a request after which a connection must make room for a new connection.
IDLE_SECONDS = 1.0
#: Bytes per second that a client must read while the server waits for it.
LOWEST_RATE = 1024
#: Size of the buffer of the system for each connection, which it would enlarge to 4 MB for a client
#: that does not read.
SEND_BUFFER = 2**18
# Bodies are written in parts of this size, so the buffer of a connection is short.
PART_BYTES = 2**16


def most_connections(limits: ServerLimits) -> int:
    """Return the limit of the options, or that of the process's file descriptors if lower."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, files - OTHER_FILES))


class Occupant(Protocol):
    """A connection, or its TLS handshake."""

    def evict(self) -> None:
        """Close the connection immediately."""


class ConnectionSlots:
    """The open connections of a server, including those before or in a TLS handshake.

    A new connection above the limit is closed, unless another connection has been without a request
    for `IDLE_SECONDS`. The oldest of these is closed instead, at first those that never sent one.

    Args:
        most: maximum number of connections.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Occupant] = set()
        # Connection -> time of the event loop from which it has no request.
        self._without_request: dict[Occupant, float] = {}
        self._between_requests: dict[Occupant, float] = {}
        self._refused, self._logged = 0, float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Occupant, now: float) -> bool:
        """Add a new connection. Return whether it may stay."""
        if len(self._open) >= self.most and not self._evict_idle(now):
            self._log_refusal(now)
            return False
        self._open.add(connection)
        self._without_request[connection] = now
        return True

    def _log_refusal(self, now: float) -> None:
        """Log refused connections at most once per second, because strangers cause them."""
        self._refused += 1
        if now - self._logged >= 1.0:
            logger.warning(
                "closed %d new connections: there are %d connections", self._refused, self.most
            )
            self._refused, self._logged = 0, now

    def _evict_idle(self, now: float) -> bool:
        for idle in (self._without_request, self._between_requests):
            oldest = next(iter(idle), None)
            if oldest is not None and now - idle[oldest] >= IDLE_SECONDS:
                self.leave(oldest)
                oldest.evict()
                return True
        return False

    def begin_request(self, connection: Occupant) -> None:
        """Record that a connection has a request."""
        self._without_request.pop(connection, None)
        self._between_requests.pop(connection, None)

    def end_request(self, connection: Occupant, now: float) -> None:
        """Record that the answer to a request was written."""
        if connection in self._open:
            self._between_requests[connection] = now

    def leave(self, connection: Occupant) -> None:
        """Remove a closed connection."""
        self.begin_request(connection)
        self._open.discard(connection)


class WriteWatch:
    """The progress of a client that reads the answers of a connection.

    Args:
        seconds: length of each period in which the client must empty the buffer, or read
            `LOWEST_RATE` bytes per second.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self.written = seconds, 0
        # Time of the begin of the period, and bytes that were read before.
        self._begin: tuple[float, int] | None = None

    def is_late(self, waiting: int, now: float) -> bool:
        """Return whether the client reads too slowly.

        Args:
            waiting: bytes that were written and not yet received, see `count_waiting`.
        """
        read = self.written - waiting
        if not waiting:
            self._begin = None
            return False
        if self._begin is None:
            self._begin = now, read
        since, previous_read = self._begin
        if now - since < self._seconds:
            return False
        self._begin = now, read
        return read - previous_read < LOWEST_RATE * (now - since)


def count_waiting(transport: asyncio.WriteTransport) -> int:
    """Return the bytes in the buffers of a connection: in this process, and in the system."""
    waiting = transport.get_write_buffer_size()
    connection = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None and connection.fileno() >= 0:
        number = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        waiting += int.from_bytes(number, sys.byteorder)
    return waiting


def abort_connection(transport: asyncio.WriteTransport) -> None:
    """Close a connection, and drop the data in its buffers, also in those of the system."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def connection_class(limits: ServerLimits, slots: ConnectionSlots) -> type[asyncio.Protocol]:
    """Return uvicorn's h11 protocol with limits.

    By default, uvicorn uses httptools if installed, which does not limit the size of headers.
    """
    seconds = limits.body_timeout
    period = min(5.0, limits.write_timeout / 4)

    class Connection(H11Protocol):
        """A connection that is closed if there are too many, if a head does not arrive in time, or
        if the client does not read its answers.

        uvicorn itself has no time limit for the head of a request, nor for an answer.
        """

        #: The TLS handshake whose slot this connection takes.
        handshake: Occupant | None = None
        _timer: asyncio.TimerHandle | None = None
        _check: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self._watch = WriteWatch(limits.write_timeout)
            app: ASGIApp = self.app

            async def with_writer(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["http_version"] == "1.1":
                    scope[WRITER] = self._write_chunk
                self._watch_writes()

                async def send_parts(message: Message) -> None:
                    body = message.get("body", b"")
                    if len(body) <= PART_BYTES:
                        self._watch.written += len(body)
                        await send(message)
                        return
                    for start in range(0, len(body), PART_BYTES):
                        part = body[start : start + PART_BYTES]
                        more = start + PART_BYTES < len(body) or message.get("more_body", False)
                        self._watch.written += len(part)
                        await send({"type": message["type"], "body": part, "more_body": more})

                await app(scope, receive, send_parts)

            self.app = with_writer

        async def _write_chunk(self, data: bytes) -> None:
            """Write a chunk of a body with chunked encoding, after the head of the response."""
            if self.flow.write_paused:
                await self.flow.drain()
            if data and self.cycle is not None and not self.cycle.disconnected:
                self._watch.written += len(data)
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if self.handshake is not None:
                slots.leave(self.handshake)
            if not slots.enter(self, self.loop.time()):
                transport.close()
                return
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_idle():
                self._wait_for_head()
            else:
                self._stop_timer()
                slots.begin_request(self)

        def on_response_complete(self) -> None:
            slots.end_request(self, self.loop.time())
            super().on_response_complete()
            if not self._is_idle():  # the next request has already arrived
                slots.begin_request(self)

        def connection_lost(self, exc: Exception | None) -> None:
            slots.leave(self)
            self._stop_timer()
            if self._check is not None:
                self._check.cancel()
                self._check = None
            super().connection_lost(exc)

        def evict(self) -> None:
            """Close the connection immediately."""
            abort_connection(self.transport)

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _watch_writes(self) -> None:
            if self._check is None:
                self._check = self.loop.call_later(period, self._check_writes)

        def _check_writes(self) -> None:
            self._check = None
            waiting = count_waiting(self.transport)
            if self._watch.is_late(waiting, self.loop.time()):
                logger.info("closed a connection: the client does not read its answer")
                abort_connection(self.transport)
            elif waiting or not self._is_idle():
                self._watch_writes()

        def _wait_for_head(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(seconds, self._close_idle)

        def _close_idle(self) -> None:
            self._timer = None
            if self._is_idle():
                self.transport.close()

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection
