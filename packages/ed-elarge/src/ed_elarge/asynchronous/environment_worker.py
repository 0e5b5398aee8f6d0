"""The process of environments and reward functions.

The trainer sends `turn`, a message of the model to which the environment of its sample replies, and
`score`, the samples of one prompt for the reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_infra.errors import ConfigError
from ed_trainers.environments import Environment, EnvironmentReply, environment_class
from ed_trainers.online.completions import as_written
from ed_trainers.options.online import RewardedArguments
from ed_trainers.rewards import Rewards

from ed_elarge.model import eLargeModel

#: Content of a message that no template changes.
_ANSWER = "ANSWER-d41c"


@dataclass
class _Episode:
    """The environment of a sample, and its conversation."""

    environment: Environment
    messages: list[Mapping[str, Any]]
    turns: int = 0
    reward: float = 0.0
    reply: EnvironmentReply = field(default_factory=EnvironmentReply)


class EnvironmentWorker:
    """Serves the requests of one trainer.

    Args:
        connection: the connection to the trainer.
        elm: the run: its environment, reward functions and tokenizer.
    """

    def __init__(self, connection: Connection, elm: eLargeModel):
        self._connection = connection
        arguments, options = elm.build_training_arguments(), elm.config.asynchronous
        folders = (elm.config.folder,)
        rewarded = isinstance(arguments, RewardedArguments)
        self._rewards = Rewards(arguments.reward_functions if rewarded else (), folders)
        self._environment: Callable[[], Environment] | None = None
        if options is not None and options.environment is not None:
            self._environment = environment_class(options.environment, folders)
        self._tokenizer = elm.part("tokenizer")
        self._episodes: dict[str, _Episode] = {}

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
        group = _Group(
            prompts=[prompt] * len(ids),
            completions=[as_written(prompt, one, self._tokenizer.decode) for one in ids],
            completion_ids=ids,
            fields={name: [value] * len(ids) for name, value in row.items()},
        )
        return {"rewards": self._rewards(group).tolist()}

    # --- environments ---

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to the newest message of a sample, in tokens."""
        name, answers, row = message["name"], message["messages"], dict(message["row"])
        prompt = row.pop("prompt")
        episode = self._episodes.get(name)
        if episode is None or episode.turns != len(answers) - 1:
            episode = self._episodes[name] = self._begin(prompt, row)
            for answer in answers[:-1]:  # a restart of this process: the recorded messages
                self._step(episode, answer)
        self._step(episode, answers[-1])
        done, tokens = episode.reply.done, list[int]()
        if not done:
            tokens = self._encode_messages(prompt, episode.reply.messages, answers[-1])
        # Without a token for the model, the sample ends here.
        ends = done or not tokens or len(tokens) >= message["room"]
        if ends:
            del self._episodes[name]
        return {"ends": ends, "done": done, "reward": episode.reward, "tokens": tokens}

    def _begin(self, prompt: Any, row: Mapping[str, Any]) -> _Episode:
        assert self._environment is not None, "the trainer sends turns only with an environment"
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not prompt or not isinstance(prompt[0], Mapping):
            raise ConfigError("an environment needs prompts that are texts or chats, not token ids")
        environment = self._environment()
        environment.reset(prompt, row)
        return _Episode(environment, list(prompt))

    def _step(self, episode: _Episode, answer: Sequence[int]) -> None:
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})
        episode.reply = EnvironmentReply(*episode.environment.step(list(episode.messages)))
        episode.messages += episode.reply.messages
        episode.reward += episode.reply.reward
        episode.turns += 1

    def _encode_messages(
        self, prompt: object, messages: Sequence[Mapping[str, Any]], answer: Sequence[int]
    ) -> list[int]:
        """Return the tokens between the newest message of the model and its next one."""
        if isinstance(prompt, str):
            text = "".join(str(message["content"]) for message in messages)
            return self._tokenizer.encode(text, add_special_tokens=False)
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        text = self._tokenizer.apply_chat_template(
            [*said, *messages], tokenize=False, add_generation_prompt=True
        )
        text = text[text.index(_ANSWER) + len(_ANSWER) :]
        end = self._tokenizer.decode(answer[-1:])
        return self._tokenizer.encode(text.removeprefix(end), add_special_tokens=False)


@dataclass
class _Group:
    """The samples of one prompt; see `ed_trainers.rewards.Completed`."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    fields: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completion_ids)
