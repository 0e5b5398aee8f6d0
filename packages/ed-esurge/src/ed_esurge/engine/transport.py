"""Transport of commands and results between the processes of one engine.

Every process runs the whole engine loop. The leader (the first process) accepts the requests and
broadcasts each command to the other processes before it executes the command. All processes have
the same state, so they plan the same steps and launch the same programs. If all processes make the
same calls, as in a trainer, nothing is broadcast (`together`).

Several engines of one process share the channel to the other processes. Each message names its
engine, and the engines have one `FairLock`, so that all processes launch their programs in one
order.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

import jax
from ed_infra import distributed
from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.core.commands import Command, UpdateWeights
from ed_esurge.engine.channel import channel
from ed_esurge.engine.wire import decode_message, encode_message
from ed_esurge.runner.protocol import Runner


class FairLock:
    """A re-entrant lock. A thread that releases the lock cannot overtake the waiting threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    def __enter__(self) -> FairLock:
        mine, turn = threading.get_ident(), threading.Event()
        with self._guard:
            if self._owner in (None, mine):
                self._owner = mine
                self._depth += 1
                return self
            self._waiting.append((mine, turn))
        turn.wait()
        return self

    def __exit__(self, *error: object) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.set()


ProcessRole = Literal["alone", "leads", "follows"]

STEP, COMMAND, BEAT, END = b"s", b"c", b"b", b"e"

# Seconds without a message after which the leader sends a heartbeat. The other processes wait in a
# collective operation, which signals cannot interrupt.
SILENCE = 5.0

# Bytes of the number of an engine in a message.
_NUMBER = 4
# Engines are numbered in the order of their creation, which is the same in all processes.
_numbers = itertools.count()
_order = FairLock()


class FollowingLoop(Protocol):
    """The loop that executes the commands of the leader."""

    def execute(self, command: Command) -> None: ...

    def step(self) -> object: ...


class Transport(Protocol):
    """Connects the loops of all processes of an engine.

    Attributes:
        together: whether every process makes the same calls, so that no commands are broadcast.
        lock: held during a command or a step.
    """

    together: bool
    lock: FairLock

    @property
    def process(self) -> int:
        """Index of this process."""
        ...

    @property
    def role(self) -> ProcessRole:
        """Role of this process: `leads` accepts commands, `follows` receives them."""
        ...

    def send(self, command: Command, runner: Runner) -> Command:
        """Broadcast a command, and return the command for the loop of this process.

        Args:
            command: the command.
            runner: the runner whose weights an `UpdateWeights` replaces.

        Raises:
            ConfigError: the command cannot be sent, or this process is not the leader.
        """
        ...

    def send_step(self) -> None:
        """Broadcast that the next step begins."""
        ...

    def beat(self) -> None:
        """Send a heartbeat if the last message is too old."""
        ...

    def follow(self, loop: FollowingLoop) -> None:
        """Execute the commands and steps of the leader until the leader calls `end`."""
        ...

    def end(self) -> None:
        """End `follow` in the other processes."""
        ...

    def gather(self, value: object) -> list[Any]:
        """Return the value of every process, in process order. A collective operation."""
        ...


class SingleProcess:
    """The transport of an engine whose devices belong to this process: nothing is sent."""

    process = 0
    role: ProcessRole = "alone"
    together = False

    def __init__(self) -> None:
        self.lock = FairLock()

    def send(self, command: Command, runner: Runner) -> Command:
        return command

    def send_step(self) -> None:
        pass

    def beat(self) -> None:
        pass

    def follow(self, loop: FollowingLoop) -> None:
        raise ConfigError(
            "all devices of the model belong to this process: there is no leader to follow"
        )

    def end(self) -> None:
        pass

    def gather(self, value: object) -> list[Any]:
        return [value]


class MultiProcess:
    """The transport of an engine over the devices of several processes; see `Transport`.

    Attributes:
        number: number of the engine, the same in all processes.
        settle: waits until the devices have finished the started steps of the engine.
    """

    # The engine of this process that sent the last message.
    _last: ClassVar[weakref.ref[MultiProcess] | None] = None

    def __init__(self) -> None:
        self.together = False
        self.lock = _order
        self.process = jax.process_index()
        self.number = next(_numbers)
        self.settle: Callable[[], None] = lambda: None
        self._last_message = 0.0  # time on the monotonic clock

    @property
    def role(self) -> ProcessRole:
        return "leads" if distributed.is_main() else "follows"

    def send(self, command: Command, runner: Runner) -> Command:
        if self.together:
            return command
        self._check_leads()
        if isinstance(command, UpdateWeights):
            command = replace(command, weights=runner.weights.check_weights(command.weights))
        try:
            message = encode_message(command)
        except Exception as error:
            raise ConfigError(
                f"{type(command).__name__} cannot be sent to the other processes ({error}): pass "
                "arrays that are fully addressable by this process"
            ) from error
        self._broadcast(COMMAND + message)
        return command

    def send_step(self) -> None:
        if not self.together:
            self._check_leads()
            self._broadcast(STEP)

    def beat(self) -> None:
        if time.monotonic() - self._last_message > SILENCE:
            self._broadcast(BEAT)

    def follow(self, loop: FollowingLoop) -> None:
        follow_all([(self, loop)])

    def end(self) -> None:
        self._check_leads()
        self._broadcast(END)

    def gather(self, value: object) -> list[Any]:
        return [decode_message(message) for message in channel().gather(encode_message(value))]

    def _broadcast(self, message: bytes) -> None:
        last = None if MultiProcess._last is None else MultiProcess._last()
        if last is not self:
            # jax runs programs in order only if one thread launches them.
            if last is not None:
                last.settle()
            MultiProcess._last = weakref.ref(self)
        number = self.number.to_bytes(_NUMBER, "big")
        channel().broadcast(message[:1] + number + message[1:])
        self._last_message = time.monotonic()

    def _check_leads(self) -> None:
        if not distributed.is_main():
            raise ConfigError(
                "the engine runs over several processes, and only the first process accepts "
                "requests: call follow() in the other processes, or make the same calls in all "
                "processes within `with engine.together():`"
            )


def follow_all(engines: Sequence[tuple[Transport, FollowingLoop]]) -> None:
    """Execute the commands and steps of the leader until the leader has ended each engine.

    Args:
        engines: transport and loop of each engine.

    Raises:
        ConfigError: this process is the leader, or all devices of an engine belong to it.
        EasyDeLError: the leader runs an engine that this process does not follow.
    """
    for transport, loop in engines:
        if not isinstance(transport, MultiProcess):
            transport.follow(loop)
    if distributed.is_main():
        raise ConfigError(
            "the first process accepts the requests: call follow() in the other processes"
        )
    loops = {one.number: loop for one, loop in engines if isinstance(one, MultiProcess)}
    while loops:
        message = channel().broadcast()
        kind, number = message[:1], int.from_bytes(message[1 : 1 + _NUMBER], "big")
        if kind == BEAT:
            continue
        if number not in loops:
            raise EasyDeLError(
                f"the first process runs the engine number {number}, which this process does not "
                "follow: create the same engines in the same order in each process, and follow "
                "them together (follow_all)"
            )
        if kind == END:
            del loops[number]
            continue
        command = decode_message(message[1 + _NUMBER :]) if kind == COMMAND else None
        try:
            if command is None:
                loops[number].step()
            else:
                loops[number].execute(command)
        except EasyDeLError:
            continue  # the leader raises the same error to its caller
