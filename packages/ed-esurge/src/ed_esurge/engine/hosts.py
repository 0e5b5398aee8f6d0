"""One engine over the devices of several processes, each of which runs all of it.

The first process takes the requests. What its loop is told, it tells the others before it does so
itself; they hold the same state, so they plan the same steps, and the device's work meets. Where
the processes make the same calls anyway, as a trainer's do, nothing is sent: see `together`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ed_infra import distributed
from ed_infra.errors import ConfigError, EasyDeLError
from ed_models.protocol import LanguageModel

from ed_esurge.core.commands import Command
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.outputs import RequestOutput

STEP, COMMAND, END = b"s", b"c", b"e"


def over_processes(model: LanguageModel) -> bool:
    """Whether a model lies on devices of several processes."""
    return len({device.process_index for device in model.config.mesh.devices.flat}) > 1


class LeadingLoop(EngineLoop):
    """The loop of the first process. Every process makes one of these; the others `follow`."""

    #: Every process makes the same calls: nothing is sent, nobody follows.
    together = False

    def execute(self, command: Command) -> None:
        """See `EngineLoop`.

        Raises:
            ConfigError: the command cannot be sent, or this is not the first process.
        """
        if self.together:
            return super().execute(command)
        self._check_leads()
        try:
            message = pickle.dumps(command)
        except Exception as error:
            raise ConfigError(
                f"{type(command).__name__} cannot be sent to the other processes ({error}): give "
                "arrays that this process holds whole"
            ) from error
        distributed.broadcast_bytes(COMMAND + message)
        super().execute(command)

    def step(self) -> list[RequestOutput]:
        """See `EngineLoop`."""
        if not self.together:
            self._check_leads()
            distributed.broadcast_bytes(STEP)
        return super().step()

    def follow(self) -> None:
        """Do what the first process does, until it has ended."""
        if distributed.is_main():
            raise ConfigError("the first process leads: it takes requests, the others follow()")
        while (message := distributed.broadcast_bytes(None)) != END:
            try:
                if message == STEP:
                    super().step()
                else:
                    super().execute(pickle.loads(message[len(COMMAND) :]))
            except EasyDeLError:
                continue  # the first process has it too, and tells who asked

    def end(self) -> None:
        """Let the others go."""
        self._check_leads()
        distributed.broadcast_bytes(END)

    def _check_leads(self) -> None:
        if not distributed.is_main():
            raise ConfigError(
                "this engine runs over several processes, and only the first one takes requests: "
                "call follow() in the others, or make the same calls in all of them within "
                "`with engine.together():`"
            )


class RunsOverProcesses:
    """The methods of an engine whose model lies on devices of several processes."""

    loop: EngineLoop

    def follow(self) -> None:
        """In each process but the first, take the steps of the first one, until its `terminate`.

        Raises:
            ConfigError: there are no other processes, or this is the first.
        """
        if not isinstance(self.loop, LeadingLoop):
            raise ConfigError("the model lies on devices of this process alone: nobody to follow")
        self.loop.follow()

    @contextmanager
    def together(self) -> Iterator[Self]:
        """A block in which every process makes the same calls, and gets the same answers.

        Nothing is sent, so weights may be lent that lie on the devices of all. Where the model lies
        on devices of this process alone, the block changes nothing.
        """
        loop = self.loop
        if not isinstance(loop, LeadingLoop):
            yield self
            return
        loop.together = True
        try:
            yield self
        finally:
            loop.together = False
