"""`Environment`: answers the messages of a model during a sample, such as with results of tools.

Reward functions are the single-turn case: without an environment, a sample ends with the first
message of the model, and the functions score the sample. An environment may also score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ed_infra.errors import ConfigError

from ed_trainers import user_code
from ed_trainers.environments.sandbox import Sandbox, SandboxResult

__all__ = ["Environment", "EnvironmentReply", "Sandbox", "SandboxResult", "environment_class"]

_Message = Mapping[str, Any]


class EnvironmentReply(NamedTuple):
    """The reaction of an environment to a message of the model.

    Attributes:
        messages: the messages that the model reads next, such as
            `[{"role": "tool", "content": "42"}]`. For a prompt of plain text, their contents are
            appended to the text. Ignored when the sample is done.
        reward: reward of this message; the rewards of a sample are added.
        done: whether the sample ends.
    """

    messages: Sequence[_Message] = ()
    reward: float = 0.0
    done: bool = False


@runtime_checkable
class Environment(Protocol):
    """One object serves one sample. A class of environments is called without arguments.

    A class with the attribute `tools`, a tuple of names of its methods, lets the model call these
    methods, see `ed_trainers.environments.tools`. `step` then receives the other messages.

    After a crash, the environment is created again, and `step` is called with the recorded messages
    of the model. The replies to the recorded messages are not used, so they may differ.
    """

    def reset(self, messages: Sequence[_Message], row: Mapping[str, Any]) -> None:
        """Begin a sample.

        Args:
            messages: the prompt; a text is one message of the user.
            row: the `additional_fields` of the row of data.
        """
        ...

    def step(self, messages: Sequence[_Message]) -> EnvironmentReply:
        """Return the reaction to the newest message of the model.

        Args:
            messages: the whole conversation; the last message is the model's.
        """
        ...


def environment_class(name: str, folders: Sequence[str | Path]) -> type[Environment]:
    """Return the class `path/file.py:Class` or `module:Class`.

    Args:
        name: the class.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: there is no such class, or it has no `reset` and `step`.
    """
    loaded_class = user_code.load_function(name, folders)
    if not isinstance(loaded_class, type) or not (
        hasattr(loaded_class, "reset") and hasattr(loaded_class, "step")
    ):
        raise ConfigError(
            f"{name} is not a class with reset(messages, row) and step(messages): see "
            "ed_trainers.environments.Environment"
        )
    return loaded_class
