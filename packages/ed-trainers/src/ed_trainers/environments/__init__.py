"""`Environment`: answers the messages of a model during a sample, such as with results of tools.

Reward functions are the single-turn case: without an environment, a sample ends with the first
message of the model, and the functions score the sample. An environment may also score.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ed_infra.errors import ConfigError, unknown_name

from ed_trainers import user_code
from ed_trainers.environments.sandbox import Sandbox, SandboxResult
from ed_trainers.options.online import EnvironmentName

__all__ = [
    "ADAPTERS",
    "Environment",
    "EnvironmentReply",
    "Sandbox",
    "SandboxResult",
    "close_environment",
    "environment_class",
    "list_first_prompts",
    "load_environment",
]

#: Name -> class of each adapter of another project's environments. The class imports the project.
ADAPTERS: dict[str, str] = {
    "gymnasium": "ed_trainers.environments.gymnasium:GymnasiumEnvironment",
    "openenv": "ed_trainers.environments.openenv:OpenEnvEnvironment",
    "verifiers": "ed_trainers.environments.verifiers:VerifiersEnvironment",
}
#: Entry points of packages that add environments.
_GROUP = "easydel.environments"

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
    """One object serves one sample. A class is called with the settings of the run file.

    A class with the attribute `tools`, a tuple of names of its methods, lets the model call these
    methods, see `ed_trainers.environments.tools`. `step` then receives the other messages. With a
    method `take_outcome()`, which returns `(reward, done)`, calls have rewards and end samples.

    The method `close()` is optional. It releases the resources of a sample that ended.

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


def close_environment(environment: object) -> None:
    """Call the method `close` of an environment, if the environment has the method."""
    close = getattr(environment, "close", None)
    if close is not None:
        close()


def environment_class(name: str, folders: Sequence[str | Path]) -> type[Environment]:
    """Return the class `path/file.py:Class` or `module:Class`, or the adapter with a name.

    Args:
        name: the class, a name of `ADAPTERS`, or an entry point of `easydel.environments`.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: there is no such class, or it has no `reset` and `step`.
    """
    if ":" in name:
        loaded_class: object = user_code.load_function(name, folders)
    else:
        check_environment_name(name)
        point = _list_entry_points().get(name)
        loaded_class = pkgutil.resolve_name(ADAPTERS[name]) if point is None else point.load()
    if not isinstance(loaded_class, type) or not (
        hasattr(loaded_class, "reset") and hasattr(loaded_class, "step")
    ):
        raise ConfigError(
            f"{name} is not a class with reset(messages, row) and step(messages): see "
            "ed_trainers.environments.Environment"
        )
    return loaded_class


def load_environment(
    entry: EnvironmentName, folders: Sequence[str | Path] = ()
) -> Callable[[], Environment]:
    """Return a function that creates the environment of one sample.

    Args:
        entry: a value of the option `environment`: a name, or a name with settings, which are
            arguments of the class.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: there is no such environment, or a setting is unknown, invalid or missing.
    """
    name, settings = split_entry(entry)
    loaded_class = environment_class(name, folders)
    for _, message in find_environment_faults(name, loaded_class, settings):
        raise ConfigError(message)
    return functools.partial(loaded_class, **settings)


def list_first_prompts(
    entry: EnvironmentName,
    rows: Iterable[Mapping[str, Any]],
    instruction: str = "",
    folders: Sequence[str | Path] = (),
) -> list[dict[str, Any]]:
    """Return rows whose prompts are the first observations of an adapter's environment.

    Args:
        entry: a value of the option `environment`, with an adapter of this package.
        rows: the fields that the environment reads, such as `{"seed": 3}`.
        instruction: text before each observation, such as the rules of a game.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: as `load_environment`, or the environment has no method `observe`.
    """
    create, prompts = load_environment(entry, folders), []
    for row in rows:
        environment = create()
        observe = getattr(environment, "observe", None)
        if observe is None:
            raise ConfigError(
                f"{split_entry(entry)[0]} has no method observe(row), which returns the first "
                "observation: write the prompts yourself, or add the method"
            )
        first = observe(row)
        if isinstance(first, str):
            content = f"{instruction}\n\n{first}" if instruction else first
            first = [{"role": "user", "content": content}]
        elif instruction:
            raise ConfigError(
                f"the tasks of {split_entry(entry)[0]} are whole prompts: omit the instruction"
            )
        prompts.append({"prompt": first, **row})
        close_environment(environment)
    return prompts


def split_entry(entry: EnvironmentName) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the settings of a value of the option `environment`."""
    return (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))


def check_environment_name(name: str) -> None:
    """Check that an adapter or an entry point has a name that contains no module.

    Raises:
        ConfigError: neither exists.
    """
    known_names = [*ADAPTERS, *_list_entry_points()]
    if name not in known_names:
        raise unknown_name("environment", name, known_names)


def find_environment_faults(
    name: str, loaded_class: type[Environment], settings: Mapping[str, Any]
) -> Iterator[tuple[str | None, str]]:
    """Yield each setting that the class of an environment does not accept, and the reason.

    Values are only compared with the types of this package's adapters.
    """
    return user_code.find_wrong_settings(
        "environment", name, loaded_class, settings, has_types=name in ADAPTERS
    )


def _list_entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}
