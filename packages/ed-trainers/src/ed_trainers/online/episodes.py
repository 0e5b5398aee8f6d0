"""Samples of several messages: an environment replies to each message of the model.

`Episode` is the conversation of one sample. `sample_episodes` completes the prompts of a generation
in the process of the trainer; asynchronous runs have episodes in other processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ed_infra import distributed
from ed_infra.errors import ConfigError, EasyDeLError

from ed_trainers.environments import (
    Environment,
    EnvironmentReply,
    close_environment,
    load_environment,
)
from ed_trainers.environments.tools import ToolEnvironment, ToolSet, write_error
from ed_trainers.online.sample_ledger import GIVEN, SamplePart, build_sample
from ed_trainers.online.turns import build_error, encode_replies
from ed_trainers.options.online import EnvironmentName
from ed_trainers.rollout import Rollout, Sampled, SampleRequest, Weights


class EpisodeTurn(NamedTuple):
    """What follows a message of the model.

    Attributes:
        ends: whether the sample ends.
        done: whether the environment ended the sample; False if a limit ended it.
        reward: sum of the rewards of the sample so far; None: there is no environment, only tools.
        tokens: the tokens that the model reads next; empty if the environment is done.
    """

    ends: bool
    done: bool
    reward: float | None
    tokens: list[int]


class Episode:
    """The conversation of one sample with its environment.

    Args:
        environment: the environment of this sample; None: there are only tools.
        prompt: the prompt as written.
        row: the fields of the row of data.
        tokenizer: decodes the messages of the model, and encodes those of the environment.
        max_turns: largest number of messages of the model; None: no limit.
        tools: the tools of the model. The environment then receives parsed calls.

    Raises:
        ConfigError: the prompt is neither a text nor a chat, or a text with tools, or there is no
            tokenizer.
    """

    def __init__(
        self,
        environment: Environment | None,
        prompt: object,
        row: Mapping[str, object],
        tokenizer: Any,
        max_turns: int | None = None,
        tools: ToolSet | None = None,
    ):
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not messages or not isinstance(messages[0], Mapping):
            raise ConfigError("an environment needs prompts that are texts or chats, not token ids")
        if tokenizer is None:
            raise ConfigError("an environment reads texts: pass a tokenizer to the trainer")
        if tools is not None and isinstance(prompt, str):
            raise ConfigError(
                "tools are part of the chat template, and this prompt is a text: write prompts as "
                "chats, [{role: user, content: …}]"
            )
        self._has_reward = environment is not None
        if tools is not None:
            environment = ToolEnvironment(tools, environment)
        assert environment is not None, "an episode has an environment or tools"
        environment.reset(messages, row)
        self.turns, self._reward = 0, 0.0
        self._environment, self._tokenizer, self._max_turns = environment, tokenizer, max_turns
        self._tools = tools
        self._messages: list[Mapping[str, Any]] = list(messages)
        self._is_text = isinstance(prompt, str)
        self._answer: Sequence[int] = ()
        self._reply = EnvironmentReply()

    def step(self, answer: Sequence[int]) -> None:
        """Show a message of the model to the environment.

        Args:
            answer: the tokens of the message, end token included.
        """
        message, problem = self._read(answer)
        self._messages.append(message)
        if problem:
            self._reply = EnvironmentReply([build_error(write_error(problem))])
        else:
            self._reply = EnvironmentReply(*self._environment.step(list(self._messages)))
        self._messages += self._reply.messages
        self._reward += self._reply.reward
        self._answer = answer
        self.turns += 1

    def _read(self, answer: Sequence[int]) -> tuple[dict[str, Any], str]:
        """Return a message of the model, and the fault of its calls."""
        if self._tools is not None:
            return self._tools.read(answer)
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return {"role": "assistant", "content": text}, ""

    def get_turn(self, room: int) -> EpisodeTurn:
        """Return what follows the newest message of the model.

        Args:
            room: number of tokens that the sample may still get.
        """
        done, tokens = self._reply.done, list[int]()
        if done and self._tools is not None and room <= 0:
            # Tools end a sample whose message has no call, also if the limit cut the message off.
            eos = getattr(self._tokenizer, "eos_token_id", None)
            done = self._answer[-1] in (eos if isinstance(eos, list) else [eos])
        elif not done:
            tokens = self._encode_messages(self._reply.messages)
        # Without a token for the model, the sample ends here.
        is_last = self._max_turns is not None and self.turns >= self._max_turns
        ends = done or is_last or not tokens or len(tokens) >= room
        return EpisodeTurn(ends, done, self._reward if self._has_reward else None, tokens)

    def close(self) -> None:
        """Release the resources of the environment."""
        close_environment(self._environment)

    def _encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens between the newest message of the model and its next one."""
        if self._is_text:
            text = "".join(str(message["content"]) for message in messages)
            return self._tokenizer.encode(text, add_special_tokens=False)
        return encode_replies(messages, self._tokenizer, self._answer[-1:]) if messages else []


#: Returns the episode of a row of `SampleRequest.rows`.
CreateEpisode = Callable[[Mapping[str, Any]], Episode]


def build_episode_factory(
    environment: EnvironmentName | None,
    folders: Sequence[str | Path],
    get_tokenizer: Callable[[], Any],
    max_turns: int | None,
    tools: ToolSet | None,
) -> CreateEpisode:
    """Return a function that begins episodes with an environment, tools, or both.

    Args:
        environment: name of the environment, see `load_environment`; None = only tools.
        folders: where the class is searched, before the working directory.
        get_tokenizer: returns the tokenizer.
        max_turns, tools: see `Episode`.

    Raises:
        ConfigError: there is no such environment.
    """
    create = (lambda: None) if environment is None else load_environment(environment, folders)

    def begin(row: Mapping[str, Any]) -> Episode:
        fields = {name: value for name, value in row.items() if name != "prompt"}
        return Episode(create(), row["prompt"], fields, get_tokenizer(), max_turns, tools)

    return begin


def sample_episodes(
    rollout: Rollout,
    request: SampleRequest,
    weights: Weights,
    create_episode: CreateEpisode,
    images: Mapping[str, np.ndarray],
) -> list[Sampled]:
    """Complete the prompts of a generation with an environment for each sample.

    The episodes exist on the first process only. All samples get their next message together.

    Args:
        rollout: completes the prompts; `max_tokens` has one number for each prompt.
        request: the prompts, and the settings of the sampling.
        weights: the weights to sample with.
        create_episode: begins the episode of a sample.
        images: arrays of the images of the prompts by name, a row for each sample.

    Raises:
        EasyDeLError: the environment raised an error.
    """
    size, copies, limit = len(request.seeds), request.copies, request.params["max_tokens"]
    parts: list[list[SamplePart]] = [[] for _ in range(size)]
    tokens: list[list[int]] = [[] for _ in range(size)]
    samples: dict[int, Sampled] = {}
    episodes: dict[int, Episode] = {}

    def reply(answers: Mapping[int, Sequence[int]]) -> list[EpisodeTurn]:
        turns = []
        for place, answer in answers.items():
            try:
                if place not in episodes:
                    episodes[place] = create_episode(request.rows[place // copies])
                episodes[place].step(answer)
                turns.append(episodes[place].get_turn(limit - len(tokens[place])))
                if turns[-1].ends:
                    episodes.pop(place).close()
            except EasyDeLError:
                raise
            except Exception as error:  # of the user's code
                raise EasyDeLError(
                    f"sample {request.number}/{place}: the environment raised "
                    f"{type(error).__name__}: {error}"
                ) from error
        return turns

    active = list(range(size))
    while active:
        sampled = rollout.generate(
            [[*request.prompts[place // copies], *tokens[place]] for place in active],
            {**request.params, "max_tokens": [limit - len(tokens[place]) for place in active]},
            weights,
            seeds=[request.seeds[place] for place in active],
            **({"images": {name: x[active] for name, x in images.items()}} if images else {}),
        )
        for place, one in zip(active, sampled, strict=True):
            part = SamplePart(list(one.token_ids), list(one.logprobs), one.weights_version, True)
            parts[place].append(part._replace(experts=one.experts, masks=one.masks))
            tokens[place] += one.token_ids
        answers = {place: parts[place][-1].tokens for place in active}
        turns = [
            EpisodeTurn(*values) for values in _call_on_main(lambda answers=answers: reply(answers))
        ]
        for place, turn in zip(active, turns, strict=True):
            if turn.ends:
                samples[place] = build_sample(parts[place], ended=turn.done, reward=turn.reward)
                continue
            parts[place].append(SamplePart(turn.tokens, [0.0] * len(turn.tokens), GIVEN))
            tokens[place] += turn.tokens
        active = [place for place in active if place not in samples]
    return [samples[place] for place in range(size)]


def _call_on_main(function: Callable[[], Any]) -> Any:
    """Return the result of a function of the first process, JSON values, on all processes."""
    content = distributed.from_main(
        lambda: np.frombuffer(json.dumps(function()).encode("utf-8"), np.uint8)
    )
    return json.loads(content.tobytes())
