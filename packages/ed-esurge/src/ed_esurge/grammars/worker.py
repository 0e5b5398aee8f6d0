"""The worker process that tries each grammar in a separate child, which may crash or hang.

The process reads its tokenizer and then jobs from standard input, and writes results to standard
output, one JSON object per line. The process is small and has one thread, so that a fork requires
only a few milliseconds. Processor time, memory and stack depth of a child are limited.

A time limit also strikes when the machine is busy or a virtual machine stalls. A job that exceeds
one is therefore tried again after the jobs that wait, and only the last trial refuses its grammar.
While other jobs wait, the first trial runs for at most `BUSY_SECONDS`, and the next ones longer.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ed_esurge.children.worker import limit_memory, limit_time
from ed_esurge.grammars.build import make_tokenizer
from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.trial import SlowStepError, compile_grammar, try_matcher

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Limits of one trial: processor time, wall time, wall time of a first trial while other jobs wait,
# and memory in addition to that of the worker process. The wall time ends a child that hangs.
CPU_SECONDS, WALL_SECONDS, BUSY_SECONDS, MEMORY = 2.0, 120.0, 1.0, 2**30
# Maximum number of trials of a job, and the factor of `BUSY_SECONDS` from one trial to the next.
# No other job ends the last trial.
TRIALS, PATIENCE = 3, 4
# Stack for compilation and for matcher steps. The engine has four times as much for the former and
# twice as much for the latter, so a grammar that passes does not overflow a stack in the engine.
STACK, STEP_STACK = 2**25, 2**20
# Maximum number of concurrent jobs.
CHILDREN = 4

TOO_LONG = (
    f"the grammar could not be compiled within {CPU_SECONDS:g} s of processor time and "
    f"{MEMORY >> 20} MiB: make the grammar smaller"
)
_TIMERS = (signal.SIGPROF, signal.SIGALRM)


@dataclass
class Running:
    """A trial of a job in its child process."""

    job: dict[str, Any]
    trial: int
    pid: int
    began: float = field(default_factory=time.monotonic)
    said: bytes = b""
    is_late: bool = False


class GrammarWorker:
    """Runs jobs until standard input ends."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # By the number of earlier trials, then in the order of arrival.
        self._waiting: list[tuple[int, int, dict[str, Any]]] = []
        self._numbers = itertools.count()
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
                trial, _, job = heapq.heappop(self._waiting)
                self._start(job, trial)

    def _read_jobs(self) -> bool:
        """Read standard input and queue the received jobs. Return False at its end."""
        data = os.read(0, 2**20)
        self._unread.append(data)
        if b"\n" not in data:
            return bool(data)
        *lines, partial_line = b"".join(self._unread).split(b"\n")
        self._unread = [partial_line]
        for line in lines:
            message = json.loads(line)
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(*message)
            else:
                self._queue(message, 0)
        return True

    def _queue(self, job: dict[str, Any], trial: int) -> None:
        heapq.heappush(self._waiting, (trial, next(self._numbers), job))

    def _start(self, job: dict[str, Any], trial: int) -> None:
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                _try_grammar(self._tokenizer, job, sink)
            finally:
                os._exit(0)
        os.close(sink)
        self._running[source] = Running(job, trial, pid)
        self._selector.register(source, selectors.EVENT_READ)

    def _read_result(self, pipe: int) -> None:
        running = self._running[pipe]
        data = os.read(pipe, 2**20)
        running.said += data
        if data:
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        _, status = os.waitpid(running.pid, 0)
        del self._running[pipe]
        if running.said.endswith(b"\n"):
            answer = json.loads(running.said)
            out_of_time = answer.pop("slow", False)
        else:
            answer = {"error": TOO_LONG}
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            out_of_time = running.is_late or ended_by in _TIMERS
        if out_of_time and running.trial + 1 < TRIALS:
            self._queue(running.job, running.trial + 1)
            return
        _write(1, json.dumps({"id": running.job["id"], **answer}).encode() + b"\n")

    def _end_late_jobs(self) -> None:
        """End long-running jobs while other jobs wait, the longest first."""
        now = time.monotonic()
        missing = len(self._waiting) - sum(running.is_late for running in self._running.values())
        for running in self._running.values():  # in the order of their starts
            is_last = running.trial + 1 == TRIALS
            over = now - running.began > BUSY_SECONDS * PATIENCE**running.trial
            if missing > 0 and over and not is_last and not running.is_late:
                running.is_late = True
                os.kill(running.pid, signal.SIGKILL)
                missing -= 1


def _try_grammar(tokenizer: LLTokenizer, job: dict[str, Any], sink: int) -> None:
    """Run one job in a child. An answer without a line end is incomplete and is ignored."""
    _limit()
    answer: dict[str, Any] = {}
    compiled_grammars: list[tuple[str, Any]] = []

    def compile_it() -> None:
        compiled_grammars.append(compile_grammar(tokenizer, (job["kind"], job["content"])))

    def try_it() -> None:
        ((text, matcher),) = compiled_grammars
        try_matcher(matcher)
        answer.update(text=text, seconds=time.process_time())

    def attempt(work: Callable[[], None]) -> None:
        try:
            work()
        except GrammarError as error:
            answer.update(error=str(error), slow=isinstance(error, SlowStepError))

    for size, work in ((STACK, compile_it), (STEP_STACK, try_it)):
        threading.stack_size(size)
        thread = threading.Thread(target=attempt, args=(work,))
        thread.start()
        thread.join()
        if not compiled_grammars:
            break
    if answer:
        _write(sink, json.dumps(answer).encode() + b"\n")


def _limit() -> None:
    # An open standard output would hide the end of the worker process from the server. The library
    # writes panics to standard error, which is the server's log.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    limit_memory(STACK + MEMORY)
    limit_time(CPU_SECONDS, WALL_SECONDS)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    # Ignore interrupts of the terminal. The server handles them and closes standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    GrammarWorker().run()
