"""Environments of other projects: Gymnasium, OpenEnv and verifiers as `trainer.environment`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ed_infra.errors import ConfigError, EasyDeLError
from ed_trainers.arguments import arguments_class
from ed_trainers.environments import list_first_prompts, load_environment
from ed_trainers.environments.tools import RemoteTool, ToolEnvironment, ToolSet, build_tool_schema

EXAMPLE = Path(__file__).parents[3] / "examples" / "tool_use"


def say(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


LAKE = {"gymnasium": {"id": "FrozenLake-v1", "kwargs": {"is_slippery": True}}}
WORDS = ["left", "down", "right", "up"]


def test_gymnasium_equals_direct_steps(gymnasium):
    reference = gymnasium.make("FrozenLake-v1", is_slippery=True)
    for seed in range(4):
        first, _ = reference.reset(seed=seed)
        environment = load_environment(LAKE)()
        assert environment.observe({"seed": seed}) == str(first)
        done = False
        for action in (1, 1, 2, 2, 1, 2, 0, 3) * 4:
            if done:
                break
            observation, reward, terminated, truncated, _ = reference.step(action)
            reply = environment.step(say(f"I saw 3 holes. My action: {action}"))
            done = terminated or truncated
            assert reply.messages == [{"role": "user", "content": str(observation)}]
            assert (reply.reward, reply.done) == (reward, done)
        environment.close()


def test_gymnasium_reads_words_and_renders_text(gymnasium):
    settings = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": WORDS}
    settings |= {"text": "render", "invalid_reward": -0.5}
    (row,) = list_first_prompts({"gymnasium": settings}, [{"seed": 0}], "Go to G.")
    assert row == {"seed": 0, "prompt": [{"role": "user", "content": row["prompt"][0]["content"]}]}
    assert row["prompt"][0]["content"] == "Go to G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    environment = load_environment({"gymnasium": settings})()
    environment.reset(row["prompt"], row)
    reply = environment.step(say("Not left: I go Right."))
    assert reply.messages[0]["content"] == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    reply = environment.step(say("I wait."))
    assert reply.messages[0]["content"].endswith("write one of left, down, right, up.")
    assert (reply.reward, reply.done) == (-0.5, False)
    for word in ("right", "down", "down", "down", "right"):
        reply = environment.step(say(word))
    assert (reply.reward, reply.done) == (1.0, True)


def test_gymnasium_environments_of_text(gymnasium, monkeypatch):
    class Echo(gymnasium.Env):
        action_space = gymnasium.spaces.Text(8)
        observation_space = gymnasium.spaces.Dict(
            {"heard": gymnasium.spaces.Text(8), "count": gymnasium.spaces.Box(0, 9, (2,), "int32")}
        )

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"heard": "", "count": self.np_random.integers(0, 9, 2)}, {}

        def step(self, action):
            return {"heard": action, "count": [1, 1]}, 0.5, False, action == "end", {}

    monkeypatch.setattr(sys.modules[__name__], "Echo", Echo, raising=False)
    gymnasium.register("EchoOfTests-v0", entry_point=Echo, disable_env_checker=True)
    environment = load_environment({"gymnasium": {"id": "EchoOfTests-v0", "role": "tool"}})()
    first = environment.observe({"seed": 3})
    assert first == environment.observe({"seed": 3}) != environment.observe({"seed": 4})
    assert set(json.loads(first)) == {"heard", "count"}
    reply = environment.step(say(" hello "))
    assert reply.messages == [{"role": "tool", "content": '{"heard": "hello", "count": [1, 1]}'}]
    assert "no valid action" in environment.step(say("much too long"))[0][0]["content"]
    assert environment.step(say("end")).done


def test_gymnasium_reads_lists(gymnasium):
    environment = load_environment({"gymnasium": {"id": "MountainCarContinuous-v0"}})()
    environment.observe({"seed": 0})
    reply = environment.step(say("Force [0.5], or rather [0.25]"))
    reference = gymnasium.make("MountainCarContinuous-v0")
    reference.reset(seed=0)
    observation = reference.step(np.asarray([0.25], np.float32))[0]
    values = json.loads(reply.messages[0]["content"])
    assert np.array_equal(np.asarray(values, np.float32), observation)
    assert max(map(len, map(str, values))) <= 14
    assert "no valid action" in environment.step(say("[2, 3]")).messages[0]["content"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "Nowhere-v0"}, r"gymnasium.make\('Nowhere-v0'\) failed"),
        ({"id": "FrozenLake-v1", "kwargs": {"colour": 1}}, "unexpected keyword argument"),
        ({"id": "FrozenLake-v1", "actions": ["go"]}, r"1 words in actions.*Discrete\(4\)"),
        ({"id": "FrozenLake-v1", "action": ["go"]}, "did you mean 'actions'"),
        ({"id": "FrozenLake-v1", "text": "picture"}, "setting of the environment 'gymnasium'"),
        ({}, "the environment 'gymnasium' needs id"),
    ],
)
def test_wrong_settings_of_gymnasium_are_errors(gymnasium, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_environment({"gymnasium": settings})()


def test_rows_without_a_seed_are_errors(gymnasium):
    environment = load_environment(LAKE)()
    with pytest.raises(ConfigError, match=r"no field 'seed' \(it has level\)"):
        environment.reset([], {"level": 1})


def test_unknown_environments_and_several_names_are_errors():
    with pytest.raises(ConfigError, match="did you mean 'gymnasium'"):
        load_environment("gymnasum")
    options = {"reward_functions": "m:f", "environment": {"openenv": {}, "gymnasium": {}}}
    with pytest.raises(ValueError, match="2 names: write NAME, or one name with its settings"):
        arguments_class("grpo")(**options)
    with pytest.raises(ValueError, match="mcp"):
        arguments_class("grpo")(reward_functions="m:f", tools=[{"mcq": {}}])


#: Replies that a server of openenv-core 0.3.0 sent (examples/tool_use/shop_server.py).
TOOLS = [
    {
        "name": "price",
        "description": "Return the price of an item.",
        "input_schema": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    }
]
RECORDED = {
    "reset": {"observation": {"text": "The shop is open."}, "reward": None, "done": False},
    "list_tools": {"observation": {"tools": TOOLS}, "reward": None, "done": False},
}


@pytest.fixture
def server():
    """Yield the address of a server that sends `RECORDED`, and its requests."""
    serving = pytest.importorskip("websockets.sync.server")
    requests = []

    def handle(connection):
        for text in connection:
            message = json.loads(text)
            requests.append(message)
            if message == {"type": "close"}:
                return
            kind, data = message["type"], message["data"]
            reply = RECORDED.get(data.get("type", kind))
            if data.get("tool_name") == "price" and data["arguments"] == {"item": "oak lamp"}:
                result = {"content": [{"type": "text", "text": "51"}], "data": 51}
                observation = {"tool_name": "price", "result": result, "error": None}
                reply = {"observation": observation, "reward": 0.25, "done": False}
            elif data.get("type") == "call_tool":
                error = {"error_type": "execution_error", "message": "the shop has no such item"}
                observation = {"tool_name": "price", "result": None, "error": error}
                reply = {"observation": observation, "reward": -0.5, "done": True}
            elif "message" in data:
                reply = {"observation": {"text": "Thank you."}, "reward": 1.0, "done": True}
            if reply is None:
                problem = {"message": "no more sessions", "code": "CAPACITY_REACHED"}
                connection.send(json.dumps({"type": "error", "data": problem}))
            else:
                connection.send(json.dumps({"type": "observation", "data": reply}))

    with serving.serve(handle, "127.0.0.1", 0) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{one.socket.getsockname()[1]}", requests
        one.shutdown()
        thread.join()


def call(name, **arguments):
    return {"id": "call00000", "function": {"name": name, "arguments": arguments}}


def test_openenv_calls_tools_and_scores_answers(server):
    url, requests = server
    settings = {"url": url, "tools": True, "action": "message", "reset_fields": ["seed"]}
    environment = load_environment({"openenv": settings})()
    assert environment.tools == ("price",)
    assert isinstance(environment.price, RemoteTool)
    assert environment.price.schema["function"]["parameters"]["required"] == ["item"]
    tools = ToolEnvironment(ToolSet({}, [], lambda ids: ({}, ""), 20.0), environment)
    tools.reset([], {"seed": 7, "item": "oak lamp"})
    assert requests[-1] == {"type": "reset", "data": {"seed": 7}}
    message = {"role": "assistant", "content": "", "tool_calls": [call("price", item="oak lamp")]}
    reply = tools.step([message])
    assert [one["content"] for one in reply.messages] == ["51"]
    assert (reply.reward, reply.done) == (0.25, False)
    reply = tools.step(say("It costs 51."))
    assert requests[-1] == {"type": "step", "data": {"message": "It costs 51."}}
    assert (reply.reward, reply.done) == (1.0, True)
    tools.reset([], {"seed": 8})
    message["tool_calls"] = [call("price", item="oak lamp"), call("price", item="moon")]
    reply = tools.step([message])
    assert reply.messages[1]["content"] == "{'error': 'the shop has no such item'}"
    assert (reply.reward, reply.done) == (-0.25, True)
    tools.close()
    assert requests[-1] == {"type": "close"}
    message["tool_calls"] = [call("price", item="oak lamp")]
    assert "ended in a sample" in tools.step([message]).messages[0]["content"]
    with pytest.raises(EasyDeLError, match="ended in a sample"):
        tools.step(say("It costs 51."))


def test_openenv_without_actions_ends_with_a_message(server):
    environment = load_environment({"openenv": {"url": server[0], "tools": True}})()
    assert environment.observe({}) == "The shop is open."
    assert environment.step(say("Done.")) == ((), 0.0, True)
    environment.close()


def test_faults_of_openenv_are_errors(server):
    url, _ = server
    for settings, message in (
        ({"url": url}, "the model can do nothing in this environment"),
        ({"url": "127.0.0.1:8000", "action": "message"}, "is no address: write http://HOST:PORT"),
        ({"url": url, "action": "message", "tool": True}, "did you mean 'tools'"),
        ({"action": "message"}, "the environment 'openenv' needs url"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_environment({"openenv": settings})()
    environment = load_environment({"openenv": {"url": url, "action": "text"}})()
    with pytest.raises(EasyDeLError, match=r"no more sessions.*max_concurrent_envs of at least"):
        environment.step(say("Hello"))
    settings = {"url": url, "action": "message", "observation": "board", "reset_fields": ["seed"]}
    environment = load_environment({"openenv": settings})()
    with pytest.raises(ConfigError, match=r"no field 'seed' of reset_fields \(it has level\)"):
        environment.reset([], {"level": 1})
    with pytest.raises(ConfigError, match=r"has no field 'board' \(it has text\)"):
        environment.reset([], {"seed": 1})
    absent = load_environment({"openenv": {"url": "http://127.0.0.1:9", "action": "message"}})()
    with pytest.raises(EasyDeLError, match=r"did not answer the request reset.*Start the server"):
        absent.reset([], {})


@pytest.mark.nightly
def test_openenv_server_of_the_example_rewards_a_looked_up_price():
    pytest.importorskip("openenv")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(EXAMPLE / "shop_server.py"), str(port)])
    try:
        settings = {"url": f"http://127.0.0.1:{port}", "tools": True, "action": "message"}
        settings |= {"reset_fields": ["seed", "item"]}
        for _ in range(200):
            with suppress(EasyDeLError):
                environment = load_environment({"openenv": settings})()
                names = environment.tools
                break
            time.sleep(0.2)
        assert names == ("price",)
        schema = build_tool_schema("price", TOOLS[0]["description"], TOOLS[0]["input_schema"])
        assert environment.price.schema == schema
        row = {"seed": 7, "item": "oak lamp"}
        tools = ToolEnvironment(ToolSet({}, [], lambda ids: ({}, ""), 20.0), environment)
        answers = []
        for item in ("oak lamp", "moon"):
            tools.reset([], row)
            message = {**say("")[0], "tool_calls": [call("price", item=item)]}
            reply = tools.step([message])
            assert (reply.reward, reply.done) == (0.0, False)
            answers.append(reply.messages[0]["content"])
            reply = tools.step(say(f"It costs {answers[0]}, for one."))
            assert (reply.reward, reply.done) == (1.0, True)
        assert answers[0] == "84" and "the shop has no moon" in answers[1]
        tools.reset([], row)
        assert tools.step(say("It costs 85.")) == (*tools.step(say("84 or 85"))[:1], 0.0, True)
        tools.close()
    finally:
        process.kill()
        process.wait()


TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for i in range(3):
            data = SumData(prompt=f"{i} + 2?", system_prompt="A number.", answer=str(i + 2))
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
"""
USER = """

class ChatConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class ChatEnv(vf.Env[ChatConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                if "fail" in segment.last_reply:
                    raise ValueError("the user leaves")
                segment = await interaction.turn(f"Not {segment.last_reply}. Again?")


__all__ = ["SumTaskset", "ChatEnv"]
"""


@pytest.mark.nightly
def test_verifiers_episodes_are_samples(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sums_of_tests.py").write_text(TASKSET)
    (tmp_path / "chats_of_tests.py").write_text(TASKSET + USER)
    entry = {"verifiers": {"taskset": "sums_of_tests"}}
    rows = list_first_prompts(entry, [{"task": i} for i in range(3)])
    prompt = [{"role": "system", "content": "A number."}, {"role": "user", "content": "1 + 2?"}]
    assert rows[1] == {"prompt": prompt, "task": 1}
    samples = [load_environment(entry)() for _ in range(4)]
    for place, environment in enumerate(samples):  # all episodes run at the same time
        environment.reset(rows[place % 3]["prompt"], rows[place % 3])
    for place, environment in enumerate(samples):
        reply = environment.step([*rows[place % 3]["prompt"], *say(f"{place + 2}")])
        assert reply == ((), 1.25 if place < 3 else 0.25, True)
    with pytest.raises(ConfigError, match=r"write the rows with .*list_first_prompts"):
        samples[0].reset(prompt, rows[0])
    with pytest.raises(ConfigError, match="no task 3: the taskset has 3"):
        samples[0].reset(prompt, {"task": 3})
    with pytest.raises(ConfigError, match="no field 'task'"):
        samples[0].reset(prompt, {})
    with pytest.raises(ConfigError, match="'nowhere' of verifiers cannot be loaded"):
        load_environment({"verifiers": {"taskset": "nowhere"}})()

    chat = load_environment({"verifiers": {"taskset": "chats_of_tests"}})()
    chat.reset(prompt, {"task": 1})
    reply = chat.step([*prompt, *say("5")])
    assert reply == ([{"role": "user", "content": "Not 5. Again?"}], 0.0, False)
    assert chat.step(say("3")) == ((), 1.5, True)
    chat.reset(prompt, {"task": 1})
    chat.close()
    chat.reset(prompt, {"task": 1})
    with pytest.raises(EasyDeLError, match="the user leaves"):
        chat.step(say("fail"))
