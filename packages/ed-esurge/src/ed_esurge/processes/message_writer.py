"""Sending of messages from a thread."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

from ed_infra.errors import EasyDeLError

from ed_esurge.engine.connection import Connection


class MessageWriter:
    """Sends messages from a thread. Messages that wait are sent together, as one list.

    Args:
        connection: the connection to the other process.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="replica-writer", daemon=True).start()

    def put(self, message: dict[str, Any]) -> None:
        """Queue a message. The reader of the connection notices a lost connection."""
        self._queue.put(message)

    def close(self) -> None:
        """Close the connection after the queued messages."""
        self._queue.put(None)

    def _run(self) -> None:
        last = False
        try:
            while not last:
                messages = [self._queue.get()]
                with suppress(queue.Empty):
                    while True:
                        messages.append(self._queue.get_nowait())
                last = None in messages
                self._connection.send([each for each in messages if each is not None])
        except EasyDeLError:
            pass  # the connection is lost
        self._connection.close()
