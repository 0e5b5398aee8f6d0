"""Answers that clients append to a conversation are accepted and reach the template."""

from __future__ import annotations

import json

import anthropic
import httpx
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import (
    TOOL_PARAMETERS,
    TOOL_REPLIES,
    TOOL_TEMPLATE,
    NamedReplies,
    byte_tokenizer,
)
from pydantic import BaseModel

ASK = {"role": "user", "content": "reply plain"}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": TOOL_PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


class LastNamed(NamedReplies):
    """Returns the reply that the last message selects."""

    def _answer(self, prompt, choice):
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        return max((text.rfind(f"reply {name}"), reply) for name, reply in TOOL_REPLIES.items())[1]


@pytest.fixture(scope="module")
def engine():
    return LastNamed(tokenizer=byte_tokenizer(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def url(engine):
    with background(engine, unknown_fields="refuse") as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def told(engine):
    """Return the messages that the template received."""
    lines = [line for line in engine.prompts[-1].split("\n") if "|>{" in line]
    return [json.loads(line[line.index("|>{") + 2 :]) for line in lines]


class Answer(BaseModel):
    """A structured answer."""

    city: str


def test_parsed_message_can_be_appended_to_the_conversation(client, engine):
    said = json.dumps({"role": "assistant", "content": '{"city": "Bern"}'})
    parsed = openai.types.chat.ParsedChatCompletionMessage[Answer](
        **json.loads(said), parsed=Answer(city="Bern"), refusal=None, annotations=None
    )
    client.chat.completions.create(model="scripted", messages=[ASK, parsed, ASK])
    assert told(engine)[1] == json.loads(said)


def test_agent_loop_can_append_messages_and_tool_results(client, engine):
    messages = [{"role": "user", "content": "reply call"}]
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "12 degrees"})
    messages.append(ASK)
    last = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    assert last.choices[0].finish_reason == "stop"
    roles = [message["role"] for message in told(engine)]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    assert told(engine)[1]["reasoning_content"] == "I look it up."


@pytest.mark.parametrize(
    ("extra", "thoughts"),
    [
        ({"parsed": {"city": "Bern"}, "id": "msg_1", "refusal": None, "annotations": []}, None),
        ({"audio": None, "function_call": None, "tool_calls": None, "name": None}, None),
        ({"provider_specific_fields": {"a": 1}, "thinking_blocks": [{"type": "thinking"}]}, None),
        ({"reasoning": "Hm.", "reasoning_details": [{}]}, "Hm."),
        ({"reasoning": "Hm.", "reasoning_content": "Hm, hm."}, "Hm, hm."),
        ({"reasoning": {"effort": "low"}}, None),
        ({"cache_control": {"type": "ephemeral"}, "images": [], "index": 0}, None),
        ({"content": [{"type": "text", "text": "Hi", "cache_control": {}, "id": "1"}]}, None),
    ],
)
def test_message_keys_of_other_servers_are_ignored(url, engine, extra, thoughts):
    message = {"role": "assistant", "content": "Hi", **extra}
    body = {"messages": [ASK, message, ASK]}
    answer = httpx.post(f"{url}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    seen = told(engine)[1]
    assert seen["content"] == "Hi"
    assert seen.get("reasoning_content") == thoughts


def test_unknown_keys_of_calls_are_ignored(url, engine):
    function = {"name": "now", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "1", "type": "function", "function": function, "index": 0, "extra_content": {}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon", "status": "success"}
    answer = httpx.post(
        f"{url}/chat/completions", json={"messages": [ASK, message, result, ASK], "tools": TOOLS}
    )
    assert answer.status_code == 200, answer.text
    assert told(engine)[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


def test_response_items_can_be_appended_to_the_next_input(client, engine):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    items = [{"role": "user", "content": "reply call"}]
    response = client.responses.create(model="scripted", input=items, tools=tools, store=False)
    items += response.output
    for item in response.output:
        if item.type == "function_call":
            output = {"type": "function_call_output", "call_id": item.call_id, "output": "12"}
            items.append({**output, "provider_specific_fields": {}})
    items.append(ASK)
    last = client.responses.create(model="scripted", input=items, tools=tools, store=False)
    assert last.output_text == "It is <b>sunny</b>."
    assert [message["role"] for message in told(engine)][1:4] == ["assistant", "tool", "tool"]


def test_anthropic_blocks_can_be_appended_to_the_conversation(url, engine):
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    tools = [{"name": "weather", "input_schema": TOOL_PARAMETERS}]
    messages = [{"role": "user", "content": "reply call"}]
    options = {"model": "scripted", "max_tokens": 500, "tools": tools}
    answer = client.messages.create(messages=messages, **options)
    messages.append({"role": "assistant", "content": answer.content, "id": answer.id})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12", "status": "ok"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages.append(
        {"role": "user", "content": [*results, {"type": "text", "text": "reply plain"}]}
    )
    assert client.messages.create(messages=messages, **options).stop_reason == "end_turn"
    assert told(engine)[1]["reasoning_content"] == "I look it up."
