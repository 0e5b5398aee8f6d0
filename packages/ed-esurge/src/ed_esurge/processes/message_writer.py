"""Sending of messages from a thread."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

from ed_infra.errors import EasyDeLError

from ed_esurge.engine.connection import Connection
from ed_esurge.engine.wire import encode_message
from ed_esurge.processes.messages import MAX_MESSAGES, encode_error


class MessageWriter:
    """Sends messages from a thread. Messages that wait are sent together, as one list.

    Args:
        connection: the connection to the other process.
        limit: maximum bytes of a list; a larger output is replaced by an error.
    """

    def __init__(self, connection: Connection, limit: int | None = None) -> None:
        self._connection, self._limit = connection, limit
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
                    while len(messages) < MAX_MESSAGES and messages[-1] is not None:
                        messages.append(self._queue.get_nowait())
                last = messages[-1] is None
                self._send([message for message in messages if message is not None])
        except EasyDeLError:
            pass  # the connection is lost
        self._connection.close()

    def _send(self, messages: list[dict[str, Any]]) -> None:
        """Send a list, in parts if the list is too large."""
        data = encode_message(messages)
        if self._limit is None or len(data) <= self._limit:
            self._connection.send_encoded(data)
        elif len(messages) > 1:
            middle = len(messages) // 2
            self._send(messages[:middle])
            self._send(messages[middle:])
        else:
            error = EasyDeLError(
                f"the answer of the replica has {len(data)} bytes, and at most {self._limit} bytes "
                "are allowed: request fewer log-probabilities, or a shorter prompt"
            )
            name = messages[0].get("id")
            self._send([{"do": "failed", "id": name, "error": encode_error(error)}])
