"""The process of environments and reward functions.

The trainer sends `turn`, a message of the model to which the environment of its sample replies, and
`score`, the samples of one prompt for the reward functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_trainers.online.completions import write_completion
from ed_trainers.online.episodes import Episode, build_episode_factory
from ed_trainers.options.online import RewardedArguments
from ed_trainers.rewards import Rewards

from ed_elarge.model import eLargeModel


class EnvironmentWorker:
    """Serves the requests of one trainer.

    Args:
        connection: the connection to the trainer.
        elm: the run: its environment, reward functions and tokenizer.
    """

    def __init__(self, connection: Connection, elm: eLargeModel):
        self._connection = connection
        arguments, environment = elm.build_training_arguments(), elm.config.environment
        folders = (elm.config.folder,)
        rewarded = isinstance(arguments, RewardedArguments)
        self._rewards = Rewards(arguments.reward_functions if rewarded else (), folders)
        self._tokenizer, self._tools = elm.part("tokenizer"), elm.part("tools")
        max_turns = getattr(arguments, "max_turns", None)
        self._create_episode = None
        if environment is not None or self._tools is not None:
            self._create_episode = build_episode_factory(
                environment, folders, lambda: self._tokenizer, max_turns, self._tools
            )
        self._episodes: dict[str, Episode] = {}

    def serve(self) -> None:
        """Reply and score until the trainer closes the connection."""
        try:
            while True:
                message = self._connection.receive()
                name, kind = message["name"], message["do"]
                try:
                    response = self._turn(message) if kind == "turn" else self._scores(message)
                except Exception as error:  # of the user's code
                    text = f"sample {name}: {type(error).__name__}: {error}"
                    response = {"do": "failed", "text": text}
                self._connection.send({"do": "done", "task": kind, "name": name, **response})
        except ConnectionLost:
            return

    def _scores(self, message: Mapping[str, Any]) -> dict[str, Any]:
        ids, row = message["completion_ids"], dict(message["row"])
        prompt = row.pop("prompt")
        read = None if self._tools is None else self._tools.read
        group = _Group(
            prompts=[prompt] * len(ids),
            completions=[
                write_completion(prompt, one, given, self._tokenizer, read)
                for one, given in zip(ids, message["given"], strict=True)
            ],
            completion_ids=ids,
            fields={name: [value] * len(ids) for name, value in row.items()},
        )
        return {"rewards": self._rewards(group).tolist()}

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to the newest message of a sample, in tokens."""
        name, answers, row = message["name"], message["messages"], dict(message["row"])
        episode = self._episodes.get(name)
        if episode is None or episode.turns != len(answers) - 1:
            assert self._create_episode is not None, "turns are sent with an environment or tools"
            if episode is not None:
                episode.close()
            episode = self._episodes[name] = self._create_episode(row)
            for answer in answers[:-1]:  # a restart of this process: the recorded messages
                episode.step(answer)
        episode.step(answers[-1])
        turn = episode.get_turn(message["room"])
        if turn.ends:
            self._episodes.pop(name).close()
        return turn._asdict()


@dataclass
class _Group:
    """The samples of one prompt; see `ed_trainers.rewards.Completed`."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    fields: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completion_ids)
