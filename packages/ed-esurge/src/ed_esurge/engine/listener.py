"""`Listener`: accepts authenticated connections, while strangers hold few of its resources."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ed_infra.errors import EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.engine.connection import Connection

logger = get_logger(__name__)

#: Maximum number of connections whose greeting is not finished. Each has one thread.
MAX_PENDING = 32
#: Seconds that a greeting may take although other connections wait. An honest greeting takes
#: milliseconds.
_GUARANTEED = 0.25
#: Seconds after an error of the operating system, such as too many open files.
_PAUSE = 0.1
#: Seconds between two warnings.
_WARN = 10.0


class Listener:
    """Accepts connections at an address, and follows each in a separate thread.

    At most `MAX_PENDING` connections are not authenticated yet. If one more arrives, the oldest of
    them is closed. No error ends the listener before `close`.

    Args:
        address: `HOST:PORT`; port 0 selects a free port.
        secret: the secret that authenticates the other ends.
        follow: called with each authenticated connection; the connection is closed afterwards.
        limit: maximum bytes of a message of the other ends.

    Attributes:
        address: the address with its port.

    Raises:
        OSError: the address is not available.
        ValueError: the port is not a number.
    """

    def __init__(
        self, address: str, secret: bytes, follow: Callable[[Connection], None], *, limit: int
    ) -> None:
        host, _, port = address.rpartition(":")
        self._secret, self._follow, self._limit = secret, follow, limit
        self._pending: dict[socket.socket, float] = {}  # stream -> monotonic time, oldest first
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._warned, self._silent = -_WARN, 0
        self._socket = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        self._closed.set()
        with suppress(OSError):  # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                stream, _ = self._socket.accept()
                self._make_room()
                self._start(stream)
            except Exception as error:  # no error of one connection may end the others
                if not self._closed.is_set():
                    self._warn(f"a connection cannot be accepted: {error}")
                    self._drop_oldest()  # frees a file descriptor and a thread
                    self._closed.wait(_PAUSE)

    def _make_room(self) -> None:
        """Wait until a further greeting may start."""
        with self._changed:
            while len(self._pending) >= MAX_PENDING and not self._closed.is_set():
                remaining = min(self._pending.values()) + _GUARANTEED - time.monotonic()
                if remaining <= 0:
                    self._drop_oldest()
                else:
                    self._changed.wait(remaining)

    def _drop_oldest(self) -> None:
        with self._changed:
            for stream in list(self._pending)[:1]:
                del self._pending[stream]
                with suppress(OSError):  # ends the read of its thread, which closes the stream
                    stream.shutdown(socket.SHUT_RDWR)

    def _start(self, stream: socket.socket) -> None:
        with self._changed:
            self._pending[stream] = time.monotonic()
        try:
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()
        except BaseException:
            self._leave(stream)
            stream.close()
            raise

    def _leave(self, stream: socket.socket) -> None:
        """Remove a connection from those whose greeting is not finished."""
        with self._changed:
            self._pending.pop(stream, None)
            self._changed.notify_all()

    def _serve(self, stream: socket.socket) -> None:
        """Greet a connection, and follow the connection to its end."""
        try:
            connection = Connection(stream, accepted=True, secret=self._secret, limit=self._limit)
        except Exception as error:  # a stranger may send anything
            self._warn(f"a connection was rejected: {error}")
            stream.close()
            return
        finally:
            self._leave(stream)
        try:
            if not self._closed.is_set():
                self._follow(connection)
        except EasyDeLError as error:
            logger.warning("a connection ended: %s", error)
        except Exception:
            logger.exception("a connection ended")
        finally:
            connection.close()

    def _warn(self, text: str) -> None:
        """Log a warning, at most one in `_WARN` seconds."""
        with self._changed:
            now = time.monotonic()
            if now - self._warned < _WARN:
                self._silent += 1
                return
            silent, self._silent, self._warned = self._silent, 0, now
        more = f" ({silent} similar warnings before)" if silent else ""
        logger.warning("%s%s", text, more)
