"""One engine over the devices of several processes. Every process runs the whole engine loop.

The leader (the first process) accepts the requests. It broadcasts each command to the other
processes before it executes the command. All processes hold the same state, so they plan the same
steps and launch the same programs. If all processes make the same calls, as in a trainer, nothing
is sent: see `together`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from ed_infra import distributed
from ed_infra.errors import ConfigError, EasyDeLError
from ed_models.protocol import LanguageModel
from jax.sharding import Mesh

from ed_esurge.core.commands import Command, UpdateWeights
from ed_esurge.engine.channel import channel
from ed_esurge.engine.loop import EngineLoop, Role
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.wire import decode, encode
from ed_esurge.outputs import RequestOutput
from ed_esurge.runner.model_runner import ModelRunner

STEP, COMMAND, BEAT, END = b"s", b"c", b"b", b"e"

# Seconds without a message after which the leader sends a heartbeat. The other processes wait in a
# collective operation, which signals cannot interrupt.
SILENCE = 5.0


def over_processes(model: LanguageModel) -> bool:
    """Return whether a model is sharded over devices of several processes."""
    return len(processes_of(model.config.mesh)) > 1


def processes_of(mesh: Mesh) -> list[int]:
    """Return the sorted indices of the processes that have devices of a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


class Leading:
    """Mixin that extends a loop to several processes.

    Every process creates one. The leader accepts commands, the other processes call `follow`.
    """

    _told = 0.0  # time of the last message on the monotonic clock

    runner: ModelRunner

    #: Whether every process makes the same calls, so that no commands are sent.
    together = False

    def execute(self, command: Command) -> None:
        """Execute a command in all processes; see `EngineLoop`.

        Raises:
            ConfigError: the command cannot be sent, or this is not the first process.
        """
        if self.together:
            return super().execute(command)  # type: ignore[misc]
        self._check_leads()
        if isinstance(command, UpdateWeights):
            leaves = self.runner.weights.checked(command.weights)
            command = replace(command, weights=leaves)
        try:
            message = encode(command)
        except Exception as error:
            raise ConfigError(
                f"{type(command).__name__} cannot be sent to the other processes ({error}): give "
                "arrays that this process holds whole"
            ) from error
        self._tell(COMMAND + message)
        super().execute(command)  # type: ignore[misc]

    def step(self) -> list[RequestOutput]:
        """Run one step in all processes; see `EngineLoop`."""
        if not self.together:
            self._check_leads()
            self._tell(STEP)
        return super().step()  # type: ignore[misc]

    def beat(self) -> None:
        """Send a heartbeat if the last message is older than `SILENCE`."""
        if time.monotonic() - self._told > SILENCE:
            self._tell(BEAT)

    @property
    def role(self) -> Role:
        """The role of this process: `leads` accepts commands, `follows` receives them."""
        return "leads" if distributed.is_main() else "follows"

    def follow(self) -> None:
        """Execute the commands and steps of the leader until the leader ends."""
        if distributed.is_main():
            raise ConfigError("the first process leads: it takes requests, the others follow()")
        while (message := channel().broadcast()) != END:
            command = decode(message[len(COMMAND) :]) if message.startswith(COMMAND) else None
            try:
                if message == STEP:
                    super().step()  # type: ignore[misc]
                elif command is not None:
                    super().execute(command)  # type: ignore[misc]
            except EasyDeLError:
                continue  # the leader raises the same error to its caller

    def end(self) -> None:
        """End `follow` in the other processes."""
        self._check_leads()
        self._tell(END)

    def _tell(self, message: bytes) -> None:
        channel().broadcast(message)
        self._told = time.monotonic()

    def _check_leads(self) -> None:
        if not distributed.is_main():
            raise ConfigError(
                "this engine runs over several processes, and only the first one takes requests: "
                "call follow() in the others, or make the same calls in all of them within "
                "`with engine.together():`"
            )


class LeadingLoop(Leading, EngineLoop):
    """The loop of one scheduler, in several processes."""


class RunsOverProcesses:
    """Methods of an engine whose model is sharded over devices of several processes."""

    loop: EngineLoop | Replicas

    @property
    def role(self) -> Role:
        """The role of this process among the processes of the model; `leads` accepts requests."""
        return self.loop.role

    def follow(self) -> None:
        """Repeat the steps of the first process until its `terminate`. Call this method in every
        other process.

        Raises:
            ConfigError: there are no other processes, or this is the first process.
        """
        if not isinstance(self.loop, Leading):
            raise ConfigError("the model lies on devices of this process alone: nobody to follow")
        self.loop.follow()

    @contextmanager
    def together(self) -> Iterator[Self]:
        """Return a context in which every process makes the same calls and receives the same
        outputs.

        No commands are sent, so weights that are sharded over all processes may be used directly.
        The context has no effect if all devices of the model belong to this process.
        """
        loop = self.loop
        if not isinstance(loop, Leading):
            yield self
            return
        loop.together = True
        try:
            yield self
        finally:
            loop.together = False
