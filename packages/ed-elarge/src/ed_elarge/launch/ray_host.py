"""The actor of one host of a Ray cluster: it runs the processes of a run on this host.

The launcher sends this module to the hosts by value, so that their Ray needs no other package.
The module therefore imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

#: Seconds in which a stopped process must end before it is killed, and in which the output of an
#: ended process must end.
_GRACE = 2.0
#: Lines that wait for the launcher; a process that prints faster waits.
_LINES = 10_000
#: Lines of one reply.
_BATCH = 1000
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def _ends_with_parent() -> Callable[[], None] | None:
    """Return a function that makes a new process end when this process ends; Linux only."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError, TypeError):
        return None
    return lambda: prctl(_PARENT_DEATH, signal.SIGKILL)


class HostProcesses:
    """The processes of a run on one host."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue(_LINES)
        self._readers: list[threading.Thread] = []
        self._since: dict[int, float] = {}  # when a process was found to have ended

    def address(self) -> tuple[str, str, int]:
        """Return the name of this host, its address in the cluster, and a free port."""
        import ray  # pyright: ignore[reportMissingImports]

        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        return socket.gethostname(), ray.util.get_node_ip_address(), port

    def begin(self, commands: Sequence[str]) -> None:
        """Start one process per shell command.

        The programs next to the interpreter of this process are found first.
        """
        prepare = _ends_with_parent()
        folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        environment = {**os.environ, "PATH": os.pathsep.join(folders)}
        for number, command in enumerate(commands):
            child = subprocess.Popen(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
                preexec_fn=prepare,
            )
            assert child.stdout is not None
            reader = threading.Thread(target=self._read, args=(number, child.stdout), daemon=True)
            reader.start()
            self._running.append(child)
            self._readers.append(reader)

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((number, line.rstrip()))

    def poll(self, seconds: float) -> tuple[list[tuple[int, str]], list[int | None]]:
        """Return new lines with the number of their process, and the exit code of every process.

        An exit code is None until the process has ended and all its lines were returned.

        Args:
            seconds: Longest time to wait for a line.
        """
        lines: list[tuple[int, str]] = []
        done = [child.poll() for child in self._running]
        now = time.monotonic()
        for number, code in enumerate(done):
            if code is not None:
                self._since.setdefault(number, now)
        # A process that the ended one started may keep its output open.
        ended = [
            number in self._since and (not reader.is_alive() or now - self._since[number] > _GRACE)
            for number, reader in enumerate(self._readers)
        ]
        try:
            lines.append(self._lines.get(timeout=0 if all(ended) else seconds))
            while len(lines) < _BATCH:
                lines.append(self._lines.get_nowait())
        except queue.Empty:
            return lines, [code if over else None for code, over in zip(done, ended, strict=True)]
        return lines, [None] * len(self._running)

    def stop(self) -> None:
        """Ask every process to save and to end."""
        for child in self._running:
            if child.poll() is None:
                child.terminate()

    def kill(self) -> None:
        """End every process and the processes that it started."""
        self.stop()
        limit = time.monotonic() + _GRACE
        while any(child.poll() is None for child in self._running) and time.monotonic() < limit:
            time.sleep(0.05)
        for child in self._running:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
