"""The worker processes of a run: started here, or joined from other hosts."""

from __future__ import annotations

import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ed_esurge.children.process import wait_or_kill
from ed_esurge.engine.channel import SECRET
from ed_esurge.engine.connection import GREETING_SECONDS, Connection, ConnectionLost, shared_secret
from ed_esurge.engine.listener import Listener
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_elarge.exits import BAD_INPUT

logger = get_logger(__name__)

#: Consecutive ends of the processes of a role without any result after which the run fails.
_RESTARTS = 10
#: Seconds in which the processes must end after the connection is closed.
_END = 5.0
#: Maximum number of lines of a log in a message.
_SHOWN = 8
#: Maximum bytes of a message of a worker.
_MAX_MESSAGE_BYTES = 2**30
#: Maximum number of connected workers.
_MAX_WORKERS = 4096


class ConnectedWorker:
    """One connected worker.

    Attributes:
        role: the kind of the process.
        load: number of its unfinished tasks.
    """

    def __init__(self, connection: Connection, role: str):
        self.role, self.load = role, 0
        self._connection = connection
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def send(self, data: bytes) -> None:
        """Queue an encoded message; the end of the connection is reported elsewhere."""
        self._out.put(data)

    def close(self) -> None:
        """Close the connection."""
        self._out.put(None)
        self._connection.close()

    def _send(self) -> None:
        try:
            while (data := self._out.get()) is not None:
                self._connection.send_encoded(data)
        except EasyDeLError:
            return


@dataclass
class _Child:
    """A process that this process started, and its log."""

    role: str
    log: Path
    process: subprocess.Popen[bytes]


class RunWorkers:
    """Starts the processes of this host, and accepts others.

    The callbacks run in threads of the connections.

    Args:
        counts: number of processes of each role on this host.
        address: `HOST:PORT` on which the trainer listens; port 0: a free port.
        run: the message that describes the run to a worker.
        logs: folder of the logs of the processes.
        on_ready: called when a worker can accept tasks.
        on_message: called for each message of a worker.
        on_lost: called when a worker is gone.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        address: str,
        run: Mapping[str, Any],
        logs: Path,
        *,
        on_ready: Callable[[ConnectedWorker], None],
        on_message: Callable[[ConnectedWorker, Mapping[str, Any]], None],
        on_lost: Callable[[ConnectedWorker], None],
    ):
        self._run, self._logs = dict(run), logs
        self._on_ready, self._on_message, self._on_lost = on_ready, on_message, on_lost
        #: Consecutive ends without a result, by role.
        self.in_vain = dict.fromkeys(counts, 0)
        self._workers: set[ConnectedWorker] = set()
        self._closed = False
        os.environ.setdefault(SECRET, secrets.token_hex(32))
        try:
            secret = shared_secret()
            self._listener = Listener(address, secret, self._serve, limit=_MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"asynchronous.listen: the address {address} cannot be used ({error})"
            ) from error
        self.address = self._listener.address
        logs.mkdir(parents=True, exist_ok=True)
        self._children = [
            self._start(role, logs / f"{role}-{number}.log")
            for role, count in counts.items()
            for number in range(count)
        ]

    @property
    def processes(self) -> dict[str, list[int]]:
        """Ids of the processes of this host by role."""
        process_ids: dict[str, list[int]] = {}
        for child in self._children:
            process_ids.setdefault(child.role, []).append(child.process.pid)
        return process_ids

    def look(self) -> None:
        """Restart the processes of this host that ended.

        Raises:
            EasyDeLError: the input of a process is invalid, or processes of a role end again and
                again.
        """
        for child in self._children:
            code = child.process.poll()
            if code is None:
                continue
            self.in_vain[child.role] += 1
            if code == BAD_INPUT or self.in_vain[child.role] > _RESTARTS:
                lines = child.log.read_text(errors="replace").splitlines()[-_SHOWN:]
                raise EasyDeLError(
                    f"a process of the role {child.role} ended with code {code}; the end of "
                    f"{child.log}: " + " | ".join(lines)
                )
            logger.warning("a process of the role %s ended (%s): restarting it", child.role, code)
            child.process = self._start(child.role, child.log).process

    def close(self) -> None:
        """End all connections and all processes of this host."""
        self._closed = True
        self._listener.close()
        for worker in list(self._workers):
            worker.close()
        wait_or_kill([child.process for child in self._children], _END)

    def _start(self, role: str, log: Path) -> _Child:
        words = [sys.executable, "-m", "ed_elarge", "join", self.address, "--as", role]
        with log.open("ab") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the trainer only
            )
        return _Child(role, log, process)

    def _serve(self, connection: Connection) -> None:
        """Follow one connection to its end.

        Raises:
            EasyDeLError: the worker has an unknown role, or sent an invalid message.
        """
        hello = connection.receive(GREETING_SECONDS)
        role = hello.get("role") if isinstance(hello, dict) else None
        if not isinstance(role, str) or role not in self.in_vain:
            raise EasyDeLError(f"a worker has the unknown role {str(role)[:64]!r}")
        if len(self._workers) >= _MAX_WORKERS:
            raise EasyDeLError(f"{_MAX_WORKERS} workers are connected: end one first")
        connection.send(self._run)
        worker = ConnectedWorker(connection, role)
        self._workers.add(worker)
        try:
            ready = connection.receive()
            if not isinstance(ready, dict) or ready.get("do") != "ready":
                raise EasyDeLError("the first message of a worker is not `ready`")
            if not self._closed:
                self._on_ready(worker)
            while True:
                self._on_message(worker, connection.receive())
        except ConnectionLost:
            pass  # the worker is gone
        finally:
            self._workers.discard(worker)
            worker.close()
            if not self._closed:
                self._on_lost(worker)
