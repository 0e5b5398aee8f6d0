"""Checks of the messages of workers. A worker with a fault or an intruder may send anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ed_infra.errors import EasyDeLError
from ed_trainers.online.sample_ledger import SampleKey

#: Kinds of tasks of each role.
_TASKS = {"engine": ("sample",), "environment": ("turn", "score")}
#: Maximum characters of the text of an error.
_MAX_TEXT = 2**20
#: Maximum number of tokens of a message that ends an episode, which the sample does not contain.
_LONG_TURN = 2**24


class WorkerMessageError(EasyDeLError):
    """A worker sent a message that no correct worker sends."""


def _require(condition: object, problem: str) -> None:
    """Raise `WorkerMessageError` unless a condition holds."""
    if not condition:
        raise WorkerMessageError(f"a worker sent an invalid message: {problem}")


def read_task(message: object, role: str) -> tuple[str, SampleKey]:
    """Return the kind and the key of the task of a message.

    Raises:
        WorkerMessageError: the message belongs to no task of the role.
    """
    _require(isinstance(message, dict), "it is no dict")
    assert isinstance(message, dict), "checked"
    kind, name = message.get("task"), message.get("name")
    _require(kind in _TASKS.get(role, ()), "a task of another role")
    _require(message.get("do") in ("part", "done", "failed"), "an unknown kind")
    _require(isinstance(name, str) and len(name) <= 64, "a wrong name of a task")
    assert isinstance(kind, str), "checked"
    assert isinstance(name, str), "checked"
    number, slash, place = name.partition("/")
    digits = number + place
    _require(slash and number and place and digits.isascii() and digits.isdigit(), "a wrong name")
    if message["do"] == "failed":
        text = message.get("text")
        _require(isinstance(text, str) and len(text) <= _MAX_TEXT, "an error without a text")
    return kind, (int(number), int(place))


@dataclass(frozen=True)
class TaskLimits:
    """What the result of a task may contain.

    Attributes:
        vocab_size: number of tokens of the vocabulary.
        room: number of tokens that the sample may still have.
        token_count: number of tokens that the sample has.
        version: newest version of the weights.
        copies: number of samples of a prompt.
        has_reward: whether an environment computes rewards; tools have none.
    """

    vocab_size: int
    room: int
    token_count: int
    version: int
    copies: int
    has_reward: bool = True

    def check(self, kind: str, message: Mapping[str, Any]) -> None:
        """Check the result of a task.

        Raises:
            WorkerMessageError: no correct worker sends this result.
        """
        if kind == "score":
            self._check_rewards(message.get("rewards"))
        elif kind == "turn":
            self._check_turn(message)
        else:
            self._check_sample(message)

    def _check_tokens(self, tokens: object, most: int) -> list[int]:
        _require(isinstance(tokens, list) and len(tokens) <= most, "a wrong number of tokens")
        assert isinstance(tokens, list), "checked"
        is_valid = all(type(token) is int and 0 <= token < self.vocab_size for token in tokens)
        _require(is_valid, "a token outside the vocabulary")
        return tokens

    def _check_sample(self, message: Mapping[str, Any]) -> None:
        tokens = self._check_tokens(message.get("tokens"), self.room)
        done = message["do"] == "done"
        _require(not done or self.token_count + len(tokens) > 0, "a sample without tokens")
        logprobs = message.get("logprobs")
        _require(
            isinstance(logprobs, list) and len(logprobs) == len(tokens), "missing probabilities"
        )
        assert isinstance(logprobs, list), "checked"
        numbers = all(isinstance(logprob, float) and logprob < math.inf for logprob in logprobs)
        _require(numbers, "a log-probability that is no number")
        version = message.get("version")
        _require(type(version) is int and 0 <= version <= self.version, "an unknown version")
        _require(not done or isinstance(message.get("ended"), bool), "a missing end")
        masks = message.get("masks")
        if masks is not None:
            _require(
                isinstance(masks, list) and len(masks) == len(tokens), "a wrong number of masks"
            )
            _require(all(map(self._is_mask, masks)), "a wrong mask")
        experts = message.get("experts")
        if experts is not None:
            right = isinstance(experts, np.ndarray) and experts.dtype == np.int16
            _require(right and experts.ndim == 3, "experts of a wrong shape")

    def _is_mask(self, mask: object) -> bool:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.int32 or mask.ndim != 1:
            return False
        return not mask.size or (mask.min() >= 0 and int(mask.max()) < self.vocab_size)

    def _check_turn(self, message: Mapping[str, Any]) -> None:
        _require(isinstance(message.get("ends"), bool), "a missing end")
        _require(isinstance(message.get("done"), bool), "a missing end of the environment")
        reward = message.get("reward")
        is_valid = isinstance(reward, float | int) if self.has_reward else reward is None
        _require(is_valid, "a reward that is no number")
        self._check_tokens(message.get("tokens"), _LONG_TURN if message["ends"] else self.room)

    def _check_rewards(self, rewards: object) -> None:
        _require(
            isinstance(rewards, list) and len(rewards) == self.copies, "a wrong number of rewards"
        )
        assert isinstance(rewards, list), "checked"
        _require(
            all(isinstance(sample_rewards, list) for sample_rewards in rewards),
            "rewards that are no lists",
        )
        _require(
            len({len(sample_rewards) for sample_rewards in rewards}) == 1,
            "rewards of different lengths",
        )
        for sample_rewards in rewards:
            _require(
                len(sample_rewards) <= 2**12
                and all(isinstance(one, float) for one in sample_rewards),
                "wrong rewards",
            )
