"""TLS handshakes within the limits of connections.

uvicorn knows a connection after its TLS handshake. Before that, a client without a handshake would
hold a file descriptor for a minute, and no limit would count the connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from ed_esurge.server.http.connections import ConnectionSlots

logger = logging.getLogger(__name__)

# Seconds to wait if the process has no file descriptor for a new connection.
RETRY_SECONDS = 0.1


class _Handshake:
    """A connection whose handshake is not complete."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def evict(self) -> None:
        self._task.cancel()


class TlsListener:
    """Accepts the connections of a listening socket, and completes their handshakes.

    Args:
        listener: the listening socket.
        context: certificate and key of the server.
        factory: returns the protocol of a new connection.
        slots: the limit of connections.
        seconds: time limit of a handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        factory: Callable[[], Any],
        slots: ConnectionSlots,
        seconds: float,
    ) -> None:
        self._listener, self._context, self._factory = listener, context, factory
        self._slots, self._seconds = slots, seconds
        self._handshakes: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self, backlog: int) -> None:
        """Listen, and accept connections in a task."""
        self._listener.listen(backlog)
        self._listener.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._accept_connections())

    def close(self) -> None:
        """Accept no further connections, and end the handshakes."""
        for task in (self._task, *self._handshakes):
            if task is not None:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the end of the task and of the handshakes."""
        tasks = [task for task in (self._task, *self._handshakes) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("cannot accept a connection (%s): trying again", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            task = loop.create_task(self._shake_hands(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        handshake = _Handshake(task)
        if not self._slots.enter(handshake, loop.time()):
            connection.close()
            return

        def build_protocol() -> Any:
            protocol = self._factory()
            protocol.handshake = handshake
            return protocol

        try:
            await loop.connect_accepted_socket(
                build_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=self._seconds,
            )
        except OSError as error:  # includes errors of TLS, and the time limit
            logger.info("a TLS handshake failed: %s", error)
        finally:
            self._slots.leave(handshake)
