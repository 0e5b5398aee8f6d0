"""The worker process that tries each grammar in a separate child, which may crash or hang.

The process reads its tokenizer and then jobs from standard input, and writes results to standard
output, one JSON object per line. The process is small and has one thread, so that a fork requires
only a few milliseconds. Processor time, memory and stack depth of a child are limited. While other
jobs wait, a child may run for at most `BUSY_SECONDS`.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.grammars.build import make_tokenizer
from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.trial import compile_grammar, try_matcher

# Limits of one job: processor time, wall time, wall time while other jobs wait, and memory in
# addition to that of the worker process.
CPU_SECONDS, WALL_SECONDS, BUSY_SECONDS, MEMORY = 2.0, 30.0, 1.0, 2**30
# Stack for compilation and for matcher steps. The engine has four times as much for the former and
# twice as much for the latter, so a grammar that passes does not overflow a stack in the engine.
STACK, STEP_STACK = 2**25, 2**20
# Maximum number of concurrent jobs.
CHILDREN = 4

TOO_LONG = (
    f"the grammar could not be compiled within {CPU_SECONDS:g} s of processor time and "
    f"{MEMORY >> 20} MiB: make the grammar smaller"
)
TOO_LONG_WHILE_OTHERS_WAIT = (
    f"the grammar could not be compiled within {BUSY_SECONDS:g} s while other grammars waited: "
    "make the grammar smaller, or try again later"
)


@dataclass
class Running:
    """A job in its child process."""

    job: int
    pid: int
    began: float = field(default_factory=time.monotonic)
    said: bytes = b""
    late: bool = False


class Worker:
    """Runs jobs until standard input ends."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: dict[int, Running] = {}  # by the pipe of the child
        self._unread: list[bytes] = []  # the beginning of a line
        self._tokenizer: Any = None

    def run(self) -> None:
        """Run jobs until standard input ends."""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            patience = 0.05 if self._waiting else None
            for key, _ in self._selector.select(patience):
                if key.fd == 0:
                    if not self._read_jobs():
                        return
                else:
                    self._read_result(key.fd)
            self._end_late_jobs()
            while self._waiting and len(self._running) < CHILDREN:
                self._start(self._waiting.popleft())

    def _read_jobs(self) -> bool:
        """Read standard input and queue the received jobs. Return False at its end."""
        data = os.read(0, 2**20)
        self._unread.append(data)
        if b"\n" not in data:
            return bool(data)
        *lines, rest = b"".join(self._unread).split(b"\n")
        self._unread = [rest]
        for line in lines:
            message = json.loads(line)
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(*message)
            else:
                self._waiting.append(message)
        return True

    def _start(self, job: dict[str, Any]) -> None:
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                _try_grammar(self._tokenizer, job, sink)
            finally:
                os._exit(0)
        os.close(sink)
        self._running[source] = Running(job["id"], pid)
        self._selector.register(source, selectors.EVENT_READ)

    def _read_result(self, pipe: int) -> None:
        running = self._running[pipe]
        data = os.read(pipe, 2**20)
        running.said += data
        if data:
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        os.waitpid(running.pid, 0)
        del self._running[pipe]
        answer = {"error": TOO_LONG_WHILE_OTHERS_WAIT if running.late else TOO_LONG}
        if running.said.endswith(b"\n"):
            answer = json.loads(running.said)
        _write(1, json.dumps({"id": running.job, **answer}).encode() + b"\n")

    def _end_late_jobs(self) -> None:
        """End long-running jobs while other jobs wait, the longest first."""
        before = time.monotonic() - BUSY_SECONDS
        missing = len(self._waiting) - sum(running.late for running in self._running.values())
        for running in self._running.values():  # in the order of their starts
            if missing > 0 and running.began < before and not running.late:
                running.late = True
                os.kill(running.pid, signal.SIGKILL)
                missing -= 1


def _try_grammar(tokenizer: Any, job: dict[str, Any], sink: int) -> None:
    """Run one job in a child. An answer without a line end is incomplete and is ignored."""
    _limit()
    answer: dict[str, Any] = {}
    made: list[tuple[str, Any]] = []

    def compile_it() -> None:
        made.append(compile_grammar(tokenizer, (job["kind"], job["content"])))

    def try_it() -> None:
        ((text, matcher),) = made
        try_matcher(matcher)
        answer.update(text=text, seconds=time.process_time())

    def attempt(work: Callable[[], None]) -> None:
        try:
            work()
        except GrammarError as error:
            answer["error"] = str(error)

    for size, work in ((STACK, compile_it), (STEP_STACK, try_it)):
        threading.stack_size(size)
        thread = threading.Thread(target=attempt, args=(work,))
        thread.start()
        thread.join()
        if not made:
            break
    if answer:
        _write(sink, json.dumps(answer).encode() + b"\n")


def _limit() -> None:
    # An open standard output would hide the end of the worker process from the server. The library
    # writes panics to standard error, which is the server's log.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems do not enforce this limit
        with open("/proc/self/statm") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = own + STACK + MEMORY
        if hard == resource.RLIM_INFINITY or hard > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    # Ignore interrupts of the terminal. The server handles them and closes standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    Worker().run()
