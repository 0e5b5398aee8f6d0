"""Environments of Gymnasium: observations and actions as text.

An observation is a message that the model reads, and the model writes its action in its next
message. `list_first_prompts` returns first observations as rows: the environment of a sample is
reset with the seed of its row, so it begins with the observation that the prompt contains.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.environments import EnvironmentReply

_Message = Mapping[str, Any]
#: A colored part of a text for terminals, such as the place of the player.
_COLORED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
_NUMBER = re.compile(r"-?\d+")


class GymnasiumEnvironment:
    """An environment of Gymnasium (`ed-trainers[gymnasium]`).

    Args:
        id: name of the environment; `module:Name-v0` imports the module that registers it.
        kwargs: arguments of `gymnasium.make`.
        actions: words for the numbers of a discrete action space, from its first number; None: the
            model writes numbers.
        text: the text that the model reads: the observation, or the text of `render()` with the
            render mode `ansi`.
        seed_field: field of the rows with the seed of the environment.
        invalid_reward: reward of a message without a valid action, which is no step of the
            environment.
        role: role of the messages with observations.

    Raises:
        ConfigError: Gymnasium is not installed, there is no such environment, or `actions` do not
            fit its action space.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        text: Literal["observation", "render"] = "observation",
        seed_field: str = "seed",
        invalid_reward: float = 0.0,
        role: str = "user",
    ) -> None:
        try:
            gymnasium = pkgutil.resolve_name("gymnasium")  # this file has the same name
        except ImportError as error:
            raise ConfigError(
                'the environment gymnasium needs a package: pip install "ed-trainers[gymnasium]"'
            ) from error
        options = dict(kwargs or {})
        if text == "render":
            options.setdefault("render_mode", "ansi")
        try:
            self._environment = gymnasium.make(id, **options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(
                f"gymnasium.make({id!r}) failed: {error}. Write the name of a registered "
                "environment, or module:NAME of a module that registers it"
            ) from error
        self._text, self._seed_field, self._role = text, seed_field, role
        self._invalid_reward = invalid_reward
        self._space, self._spaces = self._environment.action_space, gymnasium.spaces
        self._actions = self._name_actions(actions)

    def _name_actions(self, actions: Sequence[str] | None) -> dict[str, int]:
        """Return the numbers of the actions by their words."""
        if actions is None:
            return {}
        count = getattr(self._space, "n", None)
        if not isinstance(self._space, self._spaces.Discrete) or len(actions) != count:
            raise ConfigError(
                f"{len(actions)} words in actions, and the action space is {self._space}: write "
                "one word for each action of a Discrete space, or omit actions"
            )
        return {word.lower(): int(self._space.start) + i for i, word in enumerate(actions)}

    def observe(self, row: Mapping[str, Any]) -> str:
        """Reset the environment with the seed of a row, and return the first observation.

        Raises:
            ConfigError: the row has no seed.
        """
        if self._seed_field not in row:
            raise ConfigError(
                f"the row has no field {self._seed_field!r} (it has {', '.join(row) or 'none'}): "
                f"write additional_fields: [{self._seed_field}] in the entries of "
                "mixture.informs. Every sample of a prompt must begin alike"
            )
        observation, _ = self._environment.reset(seed=int(row[self._seed_field]))
        return self._write(observation)

    def reset(self, messages: Sequence[_Message], row: Mapping[str, Any]) -> None:
        """See `Environment`."""
        self.observe(row)

    def step(self, messages: Sequence[_Message]) -> EnvironmentReply:
        """See `Environment`."""
        action, fault = self._read_action(str(messages[-1]["content"]))
        if fault:
            return EnvironmentReply([{"role": self._role, "content": fault}], self._invalid_reward)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        message = {"role": self._role, "content": self._write(observation)}
        return EnvironmentReply([message], float(reward), bool(terminated or truncated))

    def close(self) -> None:
        """See `Environment`."""
        self._environment.close()

    def _read_action(self, text: str) -> tuple[Any, str]:
        """Return the action of a message, and the fault of the message."""
        spaces, space = self._spaces, self._space
        if isinstance(space, spaces.Text):
            action: object = text.strip()
        elif self._actions:
            words = re.findall("|".join(map(re.escape, self._actions)), text.lower())
            action = self._actions[words[-1]] if words else None
        elif isinstance(space, spaces.Discrete):
            numbers = _NUMBER.findall(text)
            action = int(numbers[-1]) if numbers else None
        else:
            action = _read_json(text, space)
        if action is not None and space.contains(action):
            return action, ""
        allowed = f"one of {', '.join(self._actions)}" if self._actions else f"an action of {space}"
        return None, f"The message contains no valid action: write {allowed}."

    def _write(self, observation: object) -> str:
        """Return the text of an observation, or of the rendered environment."""
        if self._text == "render":
            rendered = self._environment.render()
            if not isinstance(rendered, str):
                raise ConfigError(
                    f"render() of {self._environment} returns {type(rendered).__name__}, no text: "
                    "use an environment with the render mode ansi, or text: observation"
                )
            return _COLORED.sub(r"[\1]", rendered).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(_simplify(observation))


def _read_json(text: str, space: object) -> object:
    """Return the last JSON list of a text as an action, or None."""
    for place in (i for i in range(len(text) - 1, -1, -1) if text[i] == "["):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[place:])
            return np.asarray(value, getattr(space, "dtype", None))
        except (ValueError, TypeError):
            continue
    return None


def _simplify(value: object) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, Mapping):
        return {str(key): _simplify(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_simplify(item) for item in value]
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":  # the digits of float32, not those of its value in float64
        array = np.array([float(str(number)) for number in array.ravel()]).reshape(array.shape)
    return array.tolist()
