"""The server's interface to a worker process that does each job in a limited child.

A fault of the work, such as a crash or an endless loop, ends the child of one job, and not the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ed_esurge.children.messages import END, MEMORY, read_message, write_options

T = TypeVar("T")


class ChildEndedError(Exception):
    """The child has ended without a result: it crashed, reached a limit, or was cancelled."""


class ChildMemoryError(ChildEndedError):
    """The child has reached its limit of memory."""


@dataclass(frozen=True)
class ChildLimits:
    """Limits of a child.

    Attributes:
        cpu_seconds: processor time.
        memory: bytes in addition to those of the worker process and of the data.
        wall_seconds: elapsed time, which ends a child that waits.
    """

    cpu_seconds: float
    memory: int
    wall_seconds: float = 120.0


class JobGroup:
    """The jobs of one request, which end together when the client leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._sockets: set[socket.socket] = set()

    def cancel(self) -> None:
        """End the running jobs, whose threads then raise `ChildEndedError`, and start no more."""
        with self._lock:
            self._cancelled = True
            for peer in self._sockets:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def holding(self, peer: socket.socket) -> Iterator[None]:
        """Let `cancel` end the job of a socket inside the block.

        Raises:
            ChildEndedError: the group is cancelled.
        """
        with self._lock:
            if self._cancelled:
                raise ChildEndedError
            self._sockets.add(peer)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(peer)


async def run_cancellable(threads: Executor, work: Callable[[JobGroup], T]) -> T:
    """Return the result of work in a thread. Cancelling the task ends the jobs of the work."""
    group = JobGroup()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work, group)
    except asyncio.CancelledError:
        group.cancel()
        raise


class ProcessConnection(Protocol):
    """A process, and the channel to it."""

    process: subprocess.Popen[Any]

    def close(self) -> None:
        """End the process."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=ProcessConnection)


class StartedProcess(Generic[ConnectionT]):
    """A process that starts with its first job, and again if it has ended.

    Args:
        connect: starts the process.
    """

    def __init__(self, connect: Callable[[], ConnectionT]) -> None:
        self._open = connect
        self._lock = threading.Lock()
        self._connection: ConnectionT | None = None

    @property
    def pid(self) -> int | None:
        """Process id after the start."""
        return None if self._connection is None else self._connection.process.pid

    def start(self) -> None:
        """Start the process if none runs, without waiting for its imports."""
        with self._lock:
            self._connect()

    def _connect(self) -> ConnectionT:
        """Return the connection to the running process. The caller holds the lock."""
        connection = self._connection
        if connection is None or connection.process.poll() is not None:
            if connection is not None:
                connection.close()
            connection = self._connection = self._open()
            weakref.finalize(self, connection.close)
        return connection


class WorkerProcess(StartedProcess["_Connection"]):
    """Does jobs in children of a worker process.

    Args:
        task: the module of the worker process, see `ed_esurge.children.worker`.
    """

    def __init__(self, task: str) -> None:
        super().__init__(partial(_Connection, task))

    def messages(
        self,
        data: bytes,
        options: dict[str, Any],
        limits: ChildLimits,
        group: JobGroup | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages of the child of a job, without the last.

        Closing the iterator ends the child.

        Args:
            data: the bytes to work on.
            options: options of the task, as JSON.
            group: the jobs that are cancelled together.

        Raises:
            ChildEndedError: the child has ended early.
        """
        group = group or JobGroup()
        peer, child_socket = socket.socketpair()
        with peer, group.holding(peer):
            peer.settimeout(limits.wall_seconds)
            with child_socket, self._lock:
                self._connect().send(child_socket)
            try:
                write_options(peer, asdict(limits))
                write_options(peer, options)
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                while True:
                    kind, content = read_message(peer)
                    if kind == END:
                        return
                    if kind == MEMORY:
                        raise ChildMemoryError
                    yield kind, content
            except (OSError, EOFError):  # the child has ended, or its time
                raise ChildEndedError from None


class _Connection:
    """A worker process, and the socket that passes the sockets of jobs to the process."""

    def __init__(self, task: str) -> None:
        self._jobs, child_socket = socket.socketpair()
        with child_socket:
            self.process = start_python(
                task,
                str(child_socket.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
            )

    def send(self, peer: socket.socket) -> None:
        """Pass the socket of a job. Raises ChildEndedError: the process has just ended."""
        try:
            socket.send_fds(self._jobs, [b"."], [peer.fileno()])
        except OSError:
            raise ChildEndedError from None

    def close(self) -> None:
        """End the process."""
        self._jobs.close()
        self.process.wait()


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a module in another Python process, which imports from the same folders.

    Args:
        options: options of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        **options,
    )


def wait_or_kill(processes: Iterable[subprocess.Popen[Any]], seconds: float) -> None:
    """Wait until all processes have ended, and kill those that run after a number of seconds."""
    limit = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(limit - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
