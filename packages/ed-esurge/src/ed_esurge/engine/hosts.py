"""One engine over the devices of several processes, each of which runs all of it.

The first process takes the requests. What its loop is told, it tells the others before it does so
itself; they hold the same state, so they plan the same steps, and the device's work meets. Where
the processes make the same calls anyway, as a trainer's do, nothing is sent: see `together`.
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

# Seconds of silence before the others hear that the first process is still there. They wait within
# a collective, where no signal reaches them.
SILENCE = 5.0


def over_processes(model: LanguageModel) -> bool:
    """Whether a model lies on devices of several processes."""
    return len(processes_of(model.config.mesh)) > 1


def processes_of(mesh: Mesh) -> list[int]:
    """The processes that have devices of a mesh, in order."""
    return sorted({device.process_index for device in mesh.devices.flat})


class Leading:
    """What a loop of several processes does besides. Every process makes one; the first is told
    what to do, the others `follow`."""

    _told = 0.0  # when, on the monotonic clock

    runner: ModelRunner

    #: Every process makes the same calls: nothing is sent, nobody follows.
    together = False

    def execute(self, command: Command) -> None:
        """See `EngineLoop`.

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
        """See `EngineLoop`."""
        if not self.together:
            self._check_leads()
            self._tell(STEP)
        return super().step()  # type: ignore[misc]

    def beat(self) -> None:
        """See `EngineLoop`."""
        if time.monotonic() - self._told > SILENCE:
            self._tell(BEAT)

    @property
    def role(self) -> Role:
        """Whether this is the process that is told what to do."""
        return "leads" if distributed.is_main() else "follows"

    def follow(self) -> None:
        """Do what the first process does, until it has ended."""
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
                continue  # the first process has it too, and tells who asked

    def end(self) -> None:
        """Let the others go."""
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
    """The methods of an engine whose model lies on devices of several processes."""

    loop: EngineLoop | Replicas

    @property
    def role(self) -> Role:
        """Among the processes on whose devices the model lies: `leads` takes requests."""
        return self.loop.role

    def follow(self) -> None:
        """In each process but the first, take the steps of the first one, until its `terminate`.

        Raises:
            ConfigError: there are no other processes, or this is the first.
        """
        if not isinstance(self.loop, Leading):
            raise ConfigError("the model lies on devices of this process alone: nobody to follow")
        self.loop.follow()

    @contextmanager
    def together(self) -> Iterator[Self]:
        """A block in which every process makes the same calls, and gets the same answers.

        Nothing is sent, so weights may be lent that lie on the devices of all. Where the model lies
        on devices of this process alone, the block changes nothing.
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
