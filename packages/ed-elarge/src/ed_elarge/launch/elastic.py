"""An elastic run: connections to its members, and the loop that carries out the decisions."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from ed_infra.errors import ConfigError

from ed_elarge.exits import INTERRUPTED, STOPPED_VARIABLE, stopped_exit_code
from ed_elarge.launch.host_process import HostProcess
from ed_elarge.launch.launched_run import LaunchedRun, jax_variables
from ed_elarge.launch.member import SILENCE
from ed_elarge.launch.membership import (
    STOPPED,
    Begin,
    Directive,
    Finish,
    Membership,
    StartPhase,
    Tell,
    describe_start,
)

#: Seconds between two looks at the clocks.
_LOOK = 0.2
#: Seconds for which a start waits for absent members.
_WAIT = 120.0
#: Consecutive failed starts without a new copy of the state.
_RESTARTS = 10
#: Seconds in which the members must remove their copies and end.
_END = 10.0
#: Exit codes of a shell that cannot start a program, which no later connection repairs.
_NO_PROGRAM = (126, 127)

#: A report of a member with the number of its connection; None: the connection has ended.
MemberReport = tuple[int, int, dict[str, Any] | None]


def run_elastic(job: LaunchedRun, planned: list[HostProcess]) -> int:
    """Run until all processes have trained to the end, and return an exit code.

    Raises:
        ConfigError: This machine lacks the program of the connections.
    """
    launch = _Elastic(job, planned)
    old = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, launch.on_signal)
    try:
        return launch.loop()
    finally:
        launch.close()
        for number, handler in old.items():
            signal.signal(number, handler)


class _Connection:
    """The connection to one member: its program, and threads that read its reports and lines."""

    def __init__(
        self, member: int, number: int, process: HostProcess, reports: queue.Queue[MemberReport]
    ):
        self.number = number
        self.heard = time.monotonic()
        self.port = 0
        self._label = f"{process.host}/{member}"
        try:
            self._program = subprocess.Popen(
                process.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the launcher only
            )
        except FileNotFoundError:
            raise ConfigError(f"there is no program {process.words[0]}: install it") from None
        read = (self._read, (member, number, reports))
        show: tuple[Callable[..., None], tuple[object, ...]] = (self._show, ())
        for target, arguments in (read, show):
            threading.Thread(target=target, args=arguments, daemon=True).start()

    def _read(self, member: int, number: int, reports: queue.Queue[MemberReport]) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            try:
                report = json.loads(line)
            except ValueError:
                report = None
            if isinstance(report, dict):
                reports.put((member, number, report))
            else:  # a line of the setup
                print(f"[{self._label}] {_text(line)}", flush=True)
        reports.put((member, number, None))

    def _show(self) -> None:
        stream: IO[bytes] | None = self._program.stderr
        assert stream is not None
        for line in stream:
            print(f"[{self._label}] {_text(line)}", flush=True)

    def send(self, **request: object) -> None:
        """Write a request; the end of the connection is reported elsewhere."""
        assert self._program.stdin is not None
        with suppress(OSError):
            self._program.stdin.write(json.dumps(request).encode() + b"\n")
            self._program.stdin.flush()

    def end(self) -> None:
        """End the program of the connection."""
        self._program.kill()

    @property
    def has_no_program(self) -> bool:
        """Whether the connection ended because its host cannot start the program."""
        with suppress(subprocess.TimeoutExpired):
            return self.port == 0 and self._program.wait(1.0) in _NO_PROGRAM
        return False

    def wait(self, seconds: float) -> None:
        """Wait for the end of the program; end it after some seconds."""
        try:
            self._program.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()


class _Elastic:
    """The loop of one launch."""

    def __init__(self, job: LaunchedRun, planned: list[HostProcess]):
        self._job, self._planned = job, planned
        self._membership = Membership(len(planned), least=job.least, restarts=_RESTARTS)
        self._reports: queue.Queue[MemberReport] = queue.Queue()
        self._connections: dict[int, _Connection] = {}
        self._count = 0  # connections so far
        now = time.monotonic()
        self._again = dict.fromkeys(range(len(planned)), now)  # when to connect
        self._waiting_since = self._looked = now
        self._asked = self._heeded = 0  # requests of the user to stop
        self._by = 0  # the signal
        self._code: int | None = None
        self._unable: set[int] = set()  # members whose hosts lack the program

    def on_signal(self, number: int, frame: object) -> None:
        """Note a request to stop: the first one saves, the second one kills."""
        self._asked += 1
        self._by = number

    def loop(self) -> int:
        """Return the exit code of the run."""
        while self._code is None:
            self._connect(time.monotonic())
            if self._asked > self._heeded:
                self._heeded = self._asked
                _say("the run stops and saves" if self._asked == 1 else "the processes are killed")
                self._carry_out(self._membership.stop(kill=self._asked > 1))
            with suppress(queue.Empty):
                self._take(*self._reports.get(timeout=_LOOK))
                while self._code is None:
                    self._take(*self._reports.get_nowait())
            if self._code is None:
                self._check_clocks(time.monotonic())
        if self._asked and self._code == 0:
            return INTERRUPTED if self._by == signal.SIGINT else stopped_exit_code()
        return self._code

    def close(self) -> None:
        """End all members."""
        for connection in self._connections.values():
            connection.send(end=True)
        limit = time.monotonic() + _END
        for connection in self._connections.values():
            connection.wait(limit - time.monotonic())

    def _connect(self, now: float) -> None:
        for member, at in [*self._again.items()]:
            if now >= at:
                del self._again[member]
                self._count += 1
                process = self._planned[member]
                self._connections[member] = _Connection(member, self._count, process, self._reports)

    def _take(self, member: int, number: int, report: dict[str, Any] | None) -> None:
        connection = self._connections.get(member)
        if connection is None or connection.number != number:
            return  # an earlier connection
        connection.heard = time.monotonic()
        if report is None:
            unable = connection.has_no_program
            self._lose(member, "its connection ended")
            if unable:
                self._give_up(member)
        elif "joined" in report:
            connection.port = int(report["joined"][1])
            self._carry_out(self._membership.handle_join(member))
        elif "ended" in report:
            code, newest, connection.port = map(int, report["ended"])
            self._carry_out(self._membership.handle_end(member, code, newest))

    def _lose(self, member: int, reason: str) -> None:
        connection = self._connections.pop(member)
        connection.end()
        connection.wait(0)
        self._again[member] = time.monotonic() + self._job.rejoin
        self._carry_out(self._membership.handle_loss(member, reason))

    def _give_up(self, member: int) -> None:
        """Connect to a member without program no more; end the run if too few members remain."""
        del self._again[member]
        self._unable.add(member)
        host = self._planned[member].host
        reason = (
            f"{host} cannot start {self._job.program[0]}: install the program, or activate its "
            "environment with --setup"
        )
        if len(self._planned) - len(self._unable) < max(self._job.least, 1):
            self._finish(Finish(_NO_PROGRAM[1], reason))
        else:
            _say(reason)

    def _check_clocks(self, now: float) -> None:
        absent, previous_look, self._looked = self._membership.absent, self._looked, now
        if now - previous_look > SILENCE / 3:  # this machine stood still
            for connection in self._connections.values():
                connection.heard = now
        for member, connection in [*self._connections.items()]:
            # A member that still imports sends nothing.
            if now - connection.heard > (_WAIT if member in absent else SILENCE):
                self._lose(member, "no sign of life")
        if self._membership.phase is not StartPhase.WAITING:
            self._waiting_since = now
        elif now - self._waiting_since > _WAIT:
            self._waiting_since = now
            self._carry_out(self._membership.give_up_waiting())

    def _carry_out(self, actions: list[Directive]) -> None:
        for action in actions:
            if isinstance(action, Begin):
                self._begin(action.members)
            elif isinstance(action, Tell):
                self._connections[action.member].send(**{action.request: True})
            else:
                self._finish(action)

    def _begin(self, members: tuple[int, ...]) -> None:
        hosts = [self._planned[member].host for member in members]
        reason = self._membership.failures
        _say(f"{reason + '; ' if reason else ''}{describe_start(members, hosts)}")
        first = self._connections[members[0]]
        coordinator = f"{hosts[0].rpartition('@')[2]}:{first.port}"
        for number, member in enumerate(members):
            variables = jax_variables(coordinator, len(members), number)
            variables[STOPPED_VARIABLE] = str(STOPPED)
            self._connections[member].send(begin=variables)

    def _finish(self, action: Finish) -> None:
        self._code = action.code
        if action.code:
            _say(f"the run failed: {action.reason}; the same command continues it")


def _say(message: str) -> None:
    print(f"elastic: {message}", file=sys.stderr, flush=True)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
