"""Tools in samples: errors are results, limits hold, and messages are found in the tokens again."""

from __future__ import annotations

import re
import time

import pytest
from ed_infra.errors import ConfigError
from ed_trainers.arguments import arguments_class
from ed_trainers.environments import EnvironmentReply
from ed_trainers.environments.tools import ToolEnvironment, ToolSet, count_calls
from ed_trainers.online.episodes import Episode, sample_episodes
from ed_trainers.online.turns import encode_replies, split_completion
from ed_trainers.rollout import Sampled, SampleRequest

END = "\x03"
PROMPT = [{"role": "user", "content": "6 * 7?"}]


class Letters:
    """A tokenizer of characters, whose chat template writes one line for each message."""

    eos_token_id = ord(END)
    chat_template = "tools"

    def encode(self, text, add_special_tokens=True):
        return list(map(ord, text))

    def decode(self, ids, skip_special_tokens=False):
        text = "".join(map(chr, ids))
        return text.replace(END, "") if skip_special_tokens else text

    def apply_chat_template(self, messages, tools=None, tokenize=False, **options):
        lines = [
            f"{one['role']}:{one['content']}"
            + "".join(f"<{call['function']['name']}>" for call in one.get("tool_calls", ()))
            for one in messages
        ]
        start = "assistant:" if options.get("add_generation_prompt") else ""
        return "".join(f"{line}{END}\n" for line in lines) + start


def read(ids):
    """Read calls such as `{add 3}`; a bracket without its end is a broken call."""
    text = Letters().decode(ids, True)
    calls = [
        {
            "id": f"call{place:05}",
            "function": {"name": name, "arguments": {"value": int(value)} if value else {}},
        }
        for place, (name, value) in enumerate(re.findall(r"\{(\w+) ?(\d*)\}", text))
    ]
    content = re.sub(r"\{.*?\}", "", text)
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return message, "broken call" if "{" in content else ""


def double(value):
    return 2 * value


def fail(value=0):
    raise ValueError(f"{value} is wrong")


def leave():
    raise SystemExit


def sleep():
    time.sleep(60)


async def later(value):
    return value + 1


TOOLS = {"double": double, "fail": fail, "leave": leave, "sleep": sleep, "later": later}


def tool_set(seconds=20.0):
    return ToolSet(TOOLS, [], read, seconds)


def answer(text, seconds=20.0):
    message = read(list(map(ord, text)))[0]
    return [one["content"] for one in tool_set(seconds).answer(message)]


def test_results_and_errors_of_tools_are_messages():
    assert answer("{double 4}{later 4}") == ["8", "5"]
    assert answer("{fail 3}") == ["{'error': '3 is wrong'}"]
    assert answer("{leave}") == ["{'error': 'SystemExit'}"]
    assert answer("{nothing 1}") == ["{'error': 'Tool nothing not found.'}"]
    assert "missing 1 required positional argument" in answer("{double}")[0]
    assert answer("{sleep}", seconds=0.05) == ["{'error': 'sleep took more than 0.05 s'}"]


class Scripted:
    """Writes the next text of each sample, up to the maximum number of tokens."""

    def __init__(self, *texts):
        self.texts = [list(each) for each in texts]
        self.places = {}

    def generate(self, prompts, params, weights, *, seeds=None):
        out = []
        for seed, limit in zip(seeds, params["max_tokens"], strict=True):
            ids = list(map(ord, self.texts[seed].pop(0)))[:limit]
            out.append(Sampled(ids, [-1.0] * len(ids), 1))
        return out


class Weights:
    version = 1


def sample(*texts, length=400, max_turns=None, environment=None):
    ids = list(map(ord, "user:6 * 7?\nassistant:"))
    request = SampleRequest(
        *(0, [ids], len(texts), {"max_tokens": length}),
        *(list(range(len(texts))), [{"prompt": PROMPT}]),
    )

    def begin(row):
        inner = None if environment is None else environment()
        return Episode(inner, row["prompt"], {}, Letters(), max_turns, tool_set())

    return sample_episodes(Scripted(*texts), request, Weights(), begin, {})


def test_results_are_given_tokens_and_messages_are_found_again():
    samples = sample(
        [f"{{double 4}}{{fail 1}}{END}", f"{{double 8}}{END}", f"16.{END}"],
        [f"no{END}"],
        [f"{{double 4{END}", f"done{END}"],
    )
    first, second, broken = samples
    text = Letters().decode(first.token_ids)
    assert text == (
        f"{{double 4}}{{fail 1}}{END}\ntool:8{END}\ntool:{{'error': '1 is wrong'}}{END}\n"
        f"assistant:{{double 8}}{END}\ntool:16{END}\nassistant:16.{END}"
    )
    given = [Letters().decode(first.token_ids[at : at + n]) for at, n in first.given]
    assert given[1] == "\ntool:16" + END + "\nassistant:"
    assert second.given == () and second.rewards is None
    messages = [split_completion(one.token_ids, one.given, Letters(), read) for one in samples]
    assert [one["role"] for one in messages[0]] == [
        *("assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]
    assert [one["content"] for one in messages[0]] == [
        *("", "8", "{'error': '1 is wrong'}", "", "16", "16.")
    ]
    assert messages[0][2]["name"] == "fail"
    assert messages[1] == [{"role": "assistant", "content": "no"}]
    assert messages[2][1]["content"] == "{'error': 'broken call'}"
    assert messages[2][2]["content"] == "done"
    assert all(one.ended for one in samples)
    figures = count_calls(messages)
    assert figures == {"tools/call_frequency": 1.0, "tools/failure_frequency": 2 / 3}
    assert broken.given


def test_limits_of_turns_and_tokens_end_samples():
    calls = [f"{{double 4}}{END}"] * 9
    (limited,) = sample(calls, max_turns=2)
    assert len(limited.given) == 1 and not limited.ended
    (cut,) = sample(["a text without an end"], length=6)
    assert len(cut.token_ids) == 6 and not cut.ended
    (exact,) = sample([f"words{END}"], length=6)
    assert exact.ended
    (full,) = sample(calls, length=20)
    assert Letters().decode(full.token_ids) == calls[0]
    assert not full.given and not full.ended


def test_message_that_ends_with_another_token_gets_the_end_of_the_template():
    results = [{"role": "tool", "name": "double", "content": "8"}]
    for last in ([ord("x")], []):
        ids = encode_replies(results, Letters(), last)
        assert Letters().decode(ids) == f"{END}\ntool:8{END}\nassistant:"


def test_messages_without_calls_go_to_the_environment_of_the_run():
    class Again:
        def reset(self, messages, row):
            assert messages == PROMPT

        def step(self, messages):
            assert not messages[-1].get("tool_calls")
            if messages[-1]["content"] == "16":
                return EnvironmentReply(reward=1.0, done=True)
            return EnvironmentReply([{"role": "user", "content": "Again."}], reward=0.25)

    (one,) = sample([f"8{END}", f"{{double 8}}{END}", f"16{END}"], environment=Again)
    assert one.rewards == [1.25] and one.ended
    messages = split_completion(one.token_ids, one.given, Letters(), read)
    assert [one["content"] for one in messages] == ["8", "Again.", "", "16", "16"]


def test_methods_of_an_environment_are_tools_of_its_sample():
    class Counter:
        tools = ("count",)

        def __init__(self):
            self.total = 0

        def reset(self, messages, row):
            self.total = 0

        def count(self, value):
            self.total += value
            return self.total

        def step(self, messages):
            return EnvironmentReply(reward=float(self.total), done=True)

    samples = sample(
        [f"{{count 4}}{END}", f"{{count 5}}{{double 1}}{END}", f"9{END}"],
        [f"{{count 1}}{END}", f"1{END}"],
        environment=Counter,
    )
    assert [one.rewards for one in samples] == [[9.0], [1.0]]
    messages = split_completion(samples[0].token_ids, samples[0].given, Letters(), read)
    assert [one["content"] for one in messages if one["role"] == "tool"] == ["4", "9", "2"]


def test_tools_need_chats_and_methods_that_sample():
    with pytest.raises(ConfigError, match="this prompt is a text: write prompts as chats"):
        Episode(None, "6 * 7?", {}, Letters(), None, tool_set())
    options = arguments_class("grpo")(reward_functions="m:f", tool_timeout=2, max_turns=3)
    assert {"tool_timeout", "max_turns"} <= dict(options.idle()).keys()
    options = arguments_class("grpo")(reward_functions="m:f", tools="m:f", max_turns=3)
    assert not {"tool_timeout", "max_turns"} & dict(options.idle()).keys()
    assert options.tools == ("m:f",)
    with pytest.raises(ValueError, match="tools"):
        arguments_class("grpo")(reward_functions="m:f", tools="no function")
    assert ToolEnvironment(tool_set()).step([{"role": "assistant", "content": "a"}]).done
