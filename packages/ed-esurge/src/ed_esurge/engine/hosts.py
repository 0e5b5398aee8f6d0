"""One engine over the devices of several processes, each of which runs all of it.

The first process takes the requests. What its loop is told, it tells the others before it does so
itself; they hold the same state, so they plan the same steps, and the device's work meets.
"""

from __future__ import annotations

import pickle

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

    def execute(self, command: Command) -> None:
        """See `EngineLoop`.

        Raises:
            ConfigError: the command cannot be sent, or this is not the first process.
        """
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
                "call follow() in the others"
            )
