"""`/v1/messages` through Anthropic's client: blocks, events, tools, token counts."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest
from ed_esurge.server.launch import background
from ed_esurge.server.messages.answer import AnthropicAnswer
from ed_esurge.testing import (
    TOOL_PARAMETERS,
    TOOL_REPLIES,
    TOOL_TEMPLATE,
    NamedReplies,
    byte_tokenizer,
)

TOOLS = [
    {"name": "weather", "input_schema": TOOL_PARAMETERS},
    {"name": "now", "description": "The time.", "input_schema": {"type": "object"}},
]


@pytest.fixture(scope="module")
def engine():
    return NamedReplies(tokenizer=byte_tokenizer(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def client(engine):
    with background(engine, api_key="key") as url:
        yield anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="key", max_retries=0)


def ask(client, name, **options):
    messages = [{"role": "user", "content": f"say {name}"}]
    options = {"max_tokens": 500, **options}
    return client.messages.create(model="scripted", messages=messages, **options)


def plain(message):
    fields = message.model_dump(exclude_none=True)
    fields.pop("id")
    for block in fields["content"]:
        block.pop("id", None)
    return fields


@pytest.mark.parametrize("name", ["call", "only", "plain", "broken"])
def test_streamed_and_not(client, name):
    whole = ask(client, name, tools=TOOLS)
    AnthropicAnswer.model_validate(whole.model_dump(exclude_unset=True))
    kinds = [block.type for block in whole.content]
    if name == "call":
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert whole.content[0].thinking == "I look it up."
        assert whole.content[2].input == {"city": "Zürich", "days": 3}
        assert whole.stop_reason == "tool_use"
    elif name == "only":
        assert kinds == ["tool_use"] * 2
    else:
        assert [block.text for block in whole.content] == [TOOL_REPLIES[name]]
        assert whole.stop_reason == "end_turn"
    assert whole.usage.output_tokens == len(TOOL_REPLIES[name].encode()) + 1
    messages = [{"role": "user", "content": f"say {name}"}]
    names, arguments = [], ""
    with client.messages.stream(
        model="scripted", messages=messages, tools=TOOLS, max_tokens=500
    ) as stream:
        for event in stream:
            names.append(event.type)
            if event.type == "input_json":
                arguments += event.partial_json
        final = stream.get_final_message()
    if name != "broken":  # of whose call the client has begun a block
        assert plain(final) == plain(whole)
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        assert names.count("content_block_start") == len(whole.content)
    if name == "only":
        assert arguments == '{"city": "Zürich", "days": 3}{}'


def test_history_and_system_reach_the_template(client, engine):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Bern?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "12 °C"},
                {"type": "text", "text": "say plain", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    options = {"model": "scripted", "messages": messages, "system": "Be kind.", "tools": TOOLS}
    answer = client.messages.create(**options, max_tokens=100)
    prompt = engine.prompts[-1]
    lines = [line for line in prompt.split("\n") if "|>{" in line]
    told = [json.loads(line[line.rindex("|>{") + 2 :]) for line in lines]
    roles = ["system", "user", "assistant", "tool", "user"]
    assert [message["role"] for message in told] == roles
    assert told[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert told[2]["reasoning_content"] == "Hm"
    assert told[3]["content"] == "12 °C"
    count = client.messages.count_tokens(**options)
    assert count.input_tokens == answer.usage.input_tokens
    # An answer can be sent back as it came.
    sent = [*messages, {"role": "assistant", "content": [b.model_dump() for b in answer.content]}]
    client.messages.create(
        model="scripted", messages=[*sent, {"role": "user", "content": "say plain"}], max_tokens=9
    )


def test_why_it_ended(client):
    assert ask(client, "plain", max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, "plain", stop_sequences=["sunny"])
    assert stopped.content[0].text == "It is <b>"
    one = ask(
        client, "only", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block.name for block in one.content] == ["weather"]
    none = ask(client, "only", tools=TOOLS, tool_choice={"type": "none"})
    assert none.content[0].text == TOOL_REPLIES["only"]
    cut = ask(client, "only", tools=TOOLS, max_tokens=60)
    assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {})


def test_sampling_options_reach_the_engine(client, engine):
    ask(client, "plain", extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
    params = list(engine.requests.values())[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)


def test_refusals(client):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(
            model="claude", messages=[{"role": "user", "content": "a"}], max_tokens=1
        )
    for body, says in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "text only",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
    ):
        body = {
            "model": "scripted",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "a"}],
            **body,
        }
        with pytest.raises(anthropic.BadRequestError, match=says):
            client.post("/v1/messages", body=body, cast_to=object)


def test_the_key_may_be_anthropics(client):
    url = f"{str(client.base_url).rstrip('/')}/v1/messages"
    assert httpx.post(url, json={}).status_code == 401
    assert httpx.post(url, json={}, headers={"x-api-key": "key"}).status_code == 400
