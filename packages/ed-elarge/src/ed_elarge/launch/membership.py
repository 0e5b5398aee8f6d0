"""The members of an elastic run: decisions about starts, without processes and without clocks.

A member is a host's program that starts processes of the run. All processes of one start share one
`jax.distributed` cluster, whose size is fixed. A lost process therefore ends the start, and the
members that remain begin the next one from the newest copy of the state. A member that returns is
taken back after the running processes have saved and ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ed_elarge.exits import BAD_INPUT, FAILED

#: Exit code of a process that saved and ended on request.
STOPPED = 75


class StartPhase(Enum):
    """The state of the present start."""

    WAITING = "no process runs"
    RUNNING = "the processes train"
    JOINING = "the processes save and end, because a member returned"
    FAILING = "the processes are killed, because one was lost"
    CLOSING = "the processes save and end, because the user stopped the run"


@dataclass(frozen=True)
class Begin:
    """Start one process on each of these members, in the order of their numbers in the run."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Ask a member to let its process save and end (`stop`), or to kill the process (`kill`)."""

    member: int
    request: Literal["stop", "kill"]


@dataclass(frozen=True)
class Finish:
    """End the launch with an exit code."""

    code: int
    reason: str = ""


Directive = Begin | Tell | Finish


class Membership:
    """Decides the actions after each event. The methods return the actions in order.

    Args:
        count: number of members.
        least: smallest number of members of a start.
        restarts: number of consecutive failed starts without a new copy of the state after which
            the run fails.
    """

    def __init__(self, count: int, *, least: int, restarts: int):
        self.phase = StartPhase.WAITING
        #: Number of starts so far.
        self.starts = 0
        self._least, self._restarts = least, restarts
        self._absent = set(range(count))  # not connected
        self._hoped = set(range(count))  # absent ones for which a start waits
        self._idle: set[int] = set()
        self._running: set[int] = set()
        self._finished = False
        self._failures: list[str] = []
        self._in_vain = 0  # consecutive failed starts without a new copy
        self._newest = -1  # step of the newest copy
        self._code = FAILED

    @property
    def absent(self) -> set[int]:
        """The members without a connection."""
        return set(self._absent)

    @property
    def failures(self) -> str:
        """The failures that ended the last start."""
        return "; ".join(self._failures)

    def handle_join(self, member: int) -> list[Directive]:
        """A member has connected."""
        self._absent.discard(member)
        self._hoped.discard(member)
        self._idle.add(member)
        if self.phase is StartPhase.RUNNING:
            self.phase = StartPhase.JOINING
            return self._tell("stop")
        return self._next()

    def handle_end(self, member: int, code: int, newest: int) -> list[Directive]:
        """The process of a member has ended.

        Args:
            member: the member.
            code: exit code; negative for a signal.
            newest: step of the newest copy of the state in the memory of its host, or -1.
        """
        if member not in self._running:
            return []
        self._running.discard(member)
        self._idle.add(member)
        if newest > self._newest:
            self._newest, self._in_vain = newest, 0
        if code == 0:
            self._finished = True
            return self._next()
        if code == STOPPED and self.phase in (StartPhase.JOINING, StartPhase.CLOSING):
            return self._next()
        outcome = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self._handle_failure(f"the process of member {member} {outcome}", code)

    def handle_loss(self, member: int, reason: str) -> list[Directive]:
        """The connection to a member has ended."""
        self._idle.discard(member)
        self._hoped.discard(member)
        self._absent.add(member)
        if member not in self._running:
            return self._next()
        self._running.discard(member)
        return self._handle_failure(f"member {member} was lost ({reason})", FAILED)

    def give_up_waiting(self) -> list[Directive]:
        """The absent members took too long: start without them, or fail."""
        self._hoped.clear()
        if self.phase is StartPhase.WAITING and len(self._idle) < self._least:
            return [
                Finish(
                    FAILED,
                    f"{len(self._idle)} of at least {self._least} members are connected",
                )
            ]
        return self._next()

    def stop(self, *, kill: bool) -> list[Directive]:
        """The user stops the run."""
        if self.phase is StartPhase.WAITING:
            return [Finish(0)]
        self.phase = StartPhase.CLOSING
        return self._tell("kill" if kill else "stop")

    def _tell(self, request: Literal["stop", "kill"]) -> list[Directive]:
        return [Tell(member, request) for member in sorted(self._running)]

    def _handle_failure(self, failure: str, code: int) -> list[Directive]:
        if self.phase is StartPhase.FAILING:  # killed on request, or after its peer
            return self._next()
        self._failures, self._code = [failure], code
        if self.phase is StartPhase.CLOSING:
            return self._next()
        self.phase = StartPhase.FAILING
        self._in_vain += 1
        return [*self._tell("kill"), *self._next()]

    def _next(self) -> list[Directive]:
        """Return the actions when no process runs any more."""
        if self._running or (self.phase is StartPhase.WAITING and self._hoped):
            return []
        if self._finished:
            return [Finish(0)]
        if self.phase is StartPhase.CLOSING:
            return [Finish(0 if not self._failures else self._exit_code(), self.failures)]
        failed = self.phase is StartPhase.FAILING
        # Without a copy, an invalid run file fails again.
        if failed and (
            self._in_vain > self._restarts or (self._code == BAD_INPUT and self._newest < 0)
        ):
            return [Finish(self._exit_code(), self.failures)]
        self.phase = StartPhase.WAITING
        if len(self._idle) < self._least:
            return []
        members = tuple(sorted(self._idle))
        self.starts += 1
        self.phase = StartPhase.RUNNING
        self._running, self._idle = set(members), set()
        if not failed:
            self._failures = []
        return [Begin(members)]

    def _exit_code(self) -> int:
        return 128 - self._code if self._code < 0 else self._code


def describe_start(members: Sequence[int], hosts: Iterable[str]) -> str:
    """Return the members of a start for a message."""
    listed = ", ".join(f"{member} ({host})" for member, host in zip(members, hosts, strict=True))
    return f"{len(members)} processes on the members {listed}"
