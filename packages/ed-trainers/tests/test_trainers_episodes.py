"""Environments in the process of the trainer: samples of several messages, limits, rewards."""

from __future__ import annotations

import numpy as np
import pytest
from ed_infra.errors import ConfigError, EasyDeLError
from ed_trainers.environments import EnvironmentReply
from ed_trainers.online.episodes import Episode, sample_episodes
from ed_trainers.rollout import Sampled, SampleRequest
from online_runs import Prompts, Words, Written, online, phase_of

END = 2


class Numbers(Words):
    """A tokenizer of numbers."""

    def encode(self, text, add_special_tokens=True):
        return self(text)["input_ids"]


class Count:
    """Replies with the number of the message, and ends after `last` messages."""

    last = 3

    def reset(self, messages, row):
        assert messages == [{"role": "user", "content": row["question"]}]
        self.count = 0

    def step(self, messages):
        self.count += 1
        assert len(messages) == 2 * self.count
        if self.count == self.last:
            return EnvironmentReply(reward=1.0, done=True)
        return EnvironmentReply([{"role": "tool", "content": f"9 {self.count}"}], reward=0.25)


class Scripted:
    """Answers each prompt with its length and an end token; records its calls."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, params, weights, *, seeds=None, images=None):
        self.calls.append((prompts, params["max_tokens"], seeds, images))
        answers = [
            [len(prompt), END][:length]
            for prompt, length in zip(prompts, params["max_tokens"], strict=True)
        ]
        return [Sampled(ids, [-1.0] * len(ids), 7, ids[-1] == END) for ids in answers]


class Weights:
    version = 7


def request(max_tokens):
    rows = [{"prompt": "5 6", "question": "5 6"}, {"prompt": "8", "question": "8"}]
    return SampleRequest(
        *(0, [[5, 6], [8]], 2, {"max_tokens": max_tokens, "top_k": 0}, [1, 2, 3, 4], rows)
    )


def begin(max_turns=None, create=Count):
    def create_episode(row):
        fields = {"question": row["question"]}
        return Episode(create(), row["prompt"], fields, Numbers(), max_turns)

    return create_episode


def test_replies_are_tokens_of_a_sample_that_the_model_did_not_sample():
    rollout = Scripted()
    samples = sample_episodes(rollout, request(20), Weights(), begin(), {})
    assert samples[0].token_ids == [2, END, 9, 1, 6, END, 9, 2, 10, END]
    assert samples[0].given == ((2, 2), (6, 2))
    assert samples[0].logprobs == [-1.0, -1.0, 0.0, 0.0] * 2 + [-1.0, -1.0]
    assert samples[0].versions == ((7, 6),)
    assert [one.rewards for one in samples] == [[1.5]] * 4
    assert all(one.ended for one in samples)
    assert samples[2].token_ids[:4] == [1, END, 9, 1]
    prompts, lengths, seeds, _ = rollout.calls[1]
    assert prompts[2] == [8, 1, END, 9, 1]
    assert (lengths, seeds) == ([16] * 4, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("max_tokens", "max_turns", "messages"),
    [(20, 1, 1), (20, 2, 2), (4, None, 1), (5, None, 2), (9, None, 3)],
)
def test_a_sample_ends_at_the_limits_of_turns_and_tokens(max_tokens, max_turns, messages):
    samples = sample_episodes(Scripted(), request(max_tokens), Weights(), begin(max_turns), {})
    for one in samples:
        assert len(one.given) == messages - 1
        assert len(one.token_ids) <= max_tokens
        assert one.ended == (messages == 3)
        assert one.rewards == [1.5 if messages == 3 else 0.25 * messages]


def test_samples_that_end_early_leave_the_others():
    class Odd(Count):
        def reset(self, messages, row):
            super().reset(messages, row)
            self.last = 1 if row["question"] == "8" else 2

    rollout = Scripted()
    images = {"pixel_values": np.arange(4)[:, None]}
    samples = sample_episodes(rollout, request(20), Weights(), begin(create=Odd), images)
    assert [len(one.given) for one in samples] == [1, 1, 0, 0]
    prompts, _, seeds, more = rollout.calls[1]
    assert len(prompts) == 2
    assert seeds == [1, 2]
    assert more["pixel_values"].ravel().tolist() == [0, 1]


def test_errors_of_an_environment_name_the_sample():
    class Fails(Count):
        def step(self, messages):
            raise ValueError("no such tool")

    with pytest.raises(EasyDeLError, match="sample 0/0: the environment raised ValueError: no suc"):
        sample_episodes(Scripted(), request(20), Weights(), begin(create=Fails), {})
    with pytest.raises(ConfigError, match="texts or chats, not token ids"):
        Episode(Count(), [3, 4], {}, Numbers())
    with pytest.raises(ConfigError, match="pass a tokenizer"):
        Episode(Count(), "3", {}, None)


ECHO = """
from ed_trainers.environments import EnvironmentReply

class Echo:
    def reset(self, messages, row):
        self.count = 0

    def step(self, messages):
        self.count += 1
        if self.count == 2:
            return EnvironmentReply(reward=2.0, done=True)
        return EnvironmentReply([{"role": "tool", "content": "7"}], reward=0.5)
"""


class OneToken:
    """Answers each prompt with one token."""

    def generate(self, prompts, params, weights, *, seeds=None):
        return [Sampled([4], [-1.0], weights.version) for _ in prompts]


@pytest.mark.parametrize("functions", [True, False])
def test_rewards_of_an_environment_are_added_to_those_of_functions(toy, tmp_path, functions):
    (tmp_path / "echo.py").write_text(ECHO)
    run = online(
        *("grpo", toy.model(), tmp_path),
        environment=f"{tmp_path / 'echo.py'}:Echo",
        **({} if functions else {"rewards": ()}),
    )
    run.method.tokenizer = Numbers()
    run.method.rollout = OneToken()
    batch = Prompts(run.arguments.loader_batch_size, batch=Written).batch_at(0)
    completions = phase_of(run).complete(batch, run.weights(), 0)
    rows, figures = phase_of(run).get_rows(completions, run.weights(), 0)
    assert completions.given == [((1, 1),)] * 8
    assert figures["rewards/environment/mean"] == 2.5
    assert ("rewards/even/mean" in figures) == functions
    for row, prompt in enumerate(completions.prompt_ids):
        trained = np.flatnonzero(rows["weights"][row])
        assert trained.tolist() == [len(prompt) - 1, len(prompt) + 1]
