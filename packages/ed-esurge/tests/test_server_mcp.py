"""MCP tools of `/v1/responses`: the official client and an MCP server in another process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.server.mcp_servers import MAX_OUTPUT, read_mcp_config
from ed_esurge.testing import TOOL_TEMPLATE, ScriptedEngine, byte_tokenizer
from ed_infra.errors import ConfigError

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_tools.py"))


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


CALLS = {
    "weather": call("weather", city="Bern", days=2),
    "long": call("now"),
    "slow": call("sleepy"),
    "fails": call("broken"),
    "own": call("mine"),
}


class NamedCalls(ScriptedEngine):
    """Writes the call that the prompt names, and an answer after the result."""

    def __init__(self):
        super().__init__(
            self._answer, tokenizer=byte_tokenizer(TOOL_TEMPLATE), max_model_len=400_000
        )
        self.prompts = []

    def _answer(self, prompt, choice):
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        last = text.rsplit("<|user|>", 1)[-1]
        if "<|tool|>" in last and "forever" not in text:
            return "Done."
        return next(reply for name, reply in CALLS.items() if name in text.split("<|user|>")[1])


def stdio(**more):
    return {"command": sys.executable, "args": [SERVER, "stdio"], "timeout": 30, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    servers = {
        "free": stdio(require_approval="never"),
        "asks": stdio(allowed_tools=["weather"]),
        "slow": stdio(require_approval="never", timeout=5),
        "gone": {"command": sys.executable, "args": ["-c", "1"], "timeout": 20},
    }
    path = tmp_path_factory.mktemp("mcp") / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    engine = NamedCalls()
    with background(engine, mcp_config=path) as url:
        yield engine, openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def tool(label, **more):
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


def plain(output):
    return [
        {key: value for key, value in item.model_dump().items() if key not in ("id", "content")}
        for item in output
    ]


@pytest.mark.nightly
def test_mcp_calls_are_executed_and_their_results_continue_the_response(served):
    engine, client = served
    options = {"model": "scripted", "input": "weather", "tools": [tool("free")]}
    whole = client.responses.create(**options)
    assert [item.type for item in whole.output] == ["mcp_list_tools", "mcp_call", "message"]
    listed, made, _ = whole.output
    assert {one.name for one in listed.tools} == {"weather", "now", "sleepy", "broken"}
    assert (made.server_label, made.output, made.error) == ("free", "Bern: 2 sunny days", None)
    assert json.loads(made.arguments) == {"city": "Bern", "days": 2}
    assert whole.output_text == "Done."
    assert "Bern: 2 sunny days" in engine.prompts[-1]
    assert whole.usage.output_tokens > len("Done.")
    kinds, arguments = [], ""
    for event in client.responses.create(**options, stream=True):
        kinds.append(event.type)
        if event.type == "response.mcp_call_arguments.delta":
            arguments += event.delta
        if event.type == "response.completed":
            assert plain(event.response.output) == plain(whole.output)
    assert arguments == made.arguments
    for kind in ("mcp_list_tools.completed", "mcp_call.in_progress", "mcp_call.completed"):
        assert f"response.{kind}" in kinds
    again = client.responses.create(
        **{**options, "input": "and weather tomorrow?"}, previous_response_id=whole.id
    )
    assert [item.type for item in again.output] == ["mcp_call", "message"]
    items = [{"role": "user", "content": "weather"}, *[i.model_dump() for i in whole.output]]
    client.responses.create(**{**options, "input": [*items, {"role": "user", "content": "x"}]})


@pytest.mark.nightly
def test_mcp_calls_wait_for_the_approval_of_the_user(served):
    engine, client = served
    options = {"model": "scripted", "tools": [tool("asks")]}  # the operator requires approvals
    first = client.responses.create(**options, input="weather")
    assert [item.type for item in first.output] == ["mcp_list_tools", "mcp_approval_request"]
    assert [one.name for one in first.output[0].tools] == ["weather"]
    asked = first.output[1]
    answer = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.id,
        "approve": True,
    }
    done = client.responses.create(**options, input=[answer], previous_response_id=first.id)
    assert [item.type for item in done.output] == ["mcp_call", "message"]
    assert done.output[0].approval_request_id == asked.id
    assert done.output[0].output == "Bern: 2 sunny days"
    no = {**answer, "approve": False, "reason": "too far"}
    denied = client.responses.create(**options, input=[no], previous_response_id=first.id)
    assert [item.type for item in denied.output] == ["message"]
    assert "denied this call: too far" in engine.prompts[-1]
    with pytest.raises(openai.BadRequestError, match="does not exist in the previous response"):
        client.responses.create(**options, input=[{**answer, "approval_request_id": "mcpr_x"}])
    # By default, a request requires approvals as well.
    asking = {"type": "mcp", "server_label": "free"}
    made = client.responses.create(model="scripted", input="weather", tools=[asking])
    assert made.output[-1].type == "mcp_approval_request"


@pytest.mark.nightly
def test_mcp_calls_are_limited_in_time_size_and_number(served):
    _, client = served
    options = {"model": "scripted", "tools": [tool("free")]}
    made = client.responses.create(**options, input="long").output[1]
    assert len(made.output) < MAX_OUTPUT + 100 and made.output.endswith("more characters]")
    failed = client.responses.create(**options, input="fails").output[1]
    assert failed.output is None and "broken" in str(failed.error)
    slow = client.responses.create(model="scripted", input="slow", tools=[tool("slow")]).output[1]
    assert "did not answer within 5 s" in str(slow.error)
    many = client.responses.create(**options, input="weather forever", max_tool_calls=2)
    calls = [item for item in many.output if item.type == "mcp_call"]
    assert len(calls) == 2 and many.status == "completed"


@pytest.mark.nightly
def test_mcp_errors_name_the_problem(served):
    _, client = served
    for label, more, message in (
        ("other", {}, "no MCP server 'other'"),
        ("free", {"server_url": "http://a"}, "the operator configures"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(model="scripted", input="a", tools=[tool(label, **more)])
    with pytest.raises(openai.APIStatusError, match="cannot be reached") as error:
        client.responses.create(model="scripted", input="weather", tools=[tool("gone")])
    assert error.value.status_code == 502
    mine = {"type": "function", "name": "weather", "parameters": None, "strict": None}
    with pytest.raises(openai.BadRequestError, match="two tools have the name 'weather'"):
        client.responses.create(model="scripted", input="weather", tools=[mine, tool("free")])
    both = [{**mine, "name": "mine"}, tool("free", allowed_tools=["weather"])]
    made = client.responses.create(model="scripted", input="own", tools=both)
    assert made.output[-1].type == "function_call"  # functions of the client are not executed


@pytest.mark.nightly
def test_mcp_servers_over_http_are_called(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        url = f"http://127.0.0.1:{port}/mcp"
        servers = {
            "plain": {"url": url, "require_approval": "never"},
            "headers": {"url": url, "headers": {"X-Key": "a"}, "require_approval": "never"},
        }
        asks = {"asks": {"url": url}}  # requires approvals by default
        path = tmp_path / "mcp.json"
        path.write_text(json.dumps({"mcpServers": {**servers, **asks}}))
        with background(NamedCalls(), mcp_config=path) as base:
            client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
            for label in servers:
                made = client.responses.create(
                    model="scripted", input="weather", tools=[tool(label)]
                )
                assert made.output[1].output == "Bern: 2 sunny days"
            options = {"model": "scripted", "tools": [tool("asks")]}
            first = client.responses.create(**options, input="weather")
            asked = first.output[-1]
            assert asked.type == "mcp_approval_request"
            approval = {"type": "mcp_approval_response", "approval_request_id": asked.id}
            done = client.responses.create(
                **options, input=[{**approval, "approve": True}], previous_response_id=first.id
            )
            assert done.output[0].output == "Bern: 2 sunny days"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must contain"),
        ('{"mcpServers": {}}', "1 to 64 servers"),
        ('{"mcpServers": {"a": {}}}', "either a command"),
        ('{"mcpServers": {"a": {"url": "ftp://b"}}}', "http://"),
        ('{"mcpServers": {"a": {"command": "b", "timeout": 0}}}', r"a\.timeout"),
        ("{", "cannot be read"),
    ],
)
def test_invalid_mcp_configurations_are_refused_at_the_start(tmp_path, text, message):
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_mcp_config(path)
