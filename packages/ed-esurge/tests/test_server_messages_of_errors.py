"""Errors name the field in the spelling of the client, without names of libraries and classes."""

from __future__ import annotations

import re

import httpx
import pytest
from ed_esurge.server.http.errors import format_location, in_body
from ed_esurge.server.launch import background
from ed_esurge.testing import TOOL_TEMPLATE, NamedReplies, byte_tokenizer

USER = {"role": "user", "content": "reply plain"}
TOOL = {"type": "function", "function": {"name": "f"}}
ANTHROPIC = {"model": "scripted", "max_tokens": 9}


def chat(**fields):
    return "chat/completions", {"messages": [USER], **fields}


def said(*messages, **fields):
    return "chat/completions", {"messages": [USER, *messages], **fields}


def responses(**fields):
    return "responses", {"input": "reply plain", **fields}


def messages(*blocks, **fields):
    return "messages", {**ANTHROPIC, "messages": [{"role": "user", "content": [*blocks]}], **fields}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
INTERNAL = re.compile(
    r"tagged-union|function-(after|before|wrap|plain)|\w+(Request|Options|Block|Item|Part)\b|"
    r"constrained-|literal\[|list\[|discriminator|model_type|pydantic|valid dictionary|instance of"
)


@pytest.fixture(scope="module")
def http():
    engine = NamedReplies(tokenizer=byte_tokenizer(TOOL_TEMPLATE))
    with background(engine, unknown_fields="refuse") as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (said({"role": "user", "content": [IMAGE]}), "messages[1].content[0].image_url"),
        (said({"role": "user", "content": [{"type": "x"}]}), "messages[1].content[0].type"),
        (said({"role": "user", "content": [{"text": "a"}]}), "messages[1].content[0].type"),
        (said({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
        (said({"role": "user", "content": [{"type": "text", "text": 1}]}),
         "messages[1].content[0].text"),
        (said({"role": "user", "content": ["a"]}), "messages[1].content[0]"),
        (said({"role": "user", "content": 5}), "messages[1].content"),
        (said({"content": "a"}), "messages[1].role"),
        (said({"role": "assistant", "tool_calls": [CALL]}), "messages[1].tool_calls[0]"),
        (said("a"), "messages[1]"),
        (chat(messages="a"), "messages"),
        (chat(messages=None), "messages"),
        (chat(tools=[{"type": "web"}]), "tools[0].type"),
        (chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function"),
        (chat(tools=[TOOL], tool_choice="always"), "tool_choice"),
        (chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
         "response_format.json_schema.name"),
        (chat(stop=[1]), "stop[0]"),
        (chat(guided_json=5), "guided_json"),
        (chat(structured_outputs={"jsn": {}}), "structured_outputs.jsn"),
        (chat(structured_outputs={"json": 5}), "structured_outputs.json"),
        (("completions", {"prompt": {}}), "prompt"),
        (responses(input=[{"type": "teleport_call", "id": "a"}]), "input[0].type"),
        (responses(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
         "input[0].content[0].type"),
        (responses(input=[{"role": "user"}]), "input[0].content"),
        (responses(input=[{"type": "function_call", "call_id": "1", "name": "f"}]),
         "input[0].arguments"),
        (responses(text={"format": {"type": "xml"}}), "text.format.type"),
        (responses(tool_choice="required"), "tool_choice"),
        (messages({"type": "image", "source": {}}), "messages[0].content[0].source"),
        (messages({"type": "hologram", "source": {}}), "messages[0].content[0].type"),
        (messages({"type": "document", "source": {}}), "messages[0].content[0].source.type"),
        (messages({"type": "text"}), "messages[0].content[0].text"),
        (messages({"type": "thinking", "thinking": "a", "signature": 5}),
         "messages[0].content[0].signature"),
        (messages({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "video"}]}),
         "messages[0].content[0].content[0].type"),
        (messages(tools=[{"type": "custom", "name": "web_search"}]), "tools[0]"),
        (messages(tool_choice={"type": "any"}), "tool_choice"),
        (("embeddings", {"input": 5}), "input"),
        (("rerank", {"query": "a", "documents": [5]}), "documents[0]"),
    ],
    ids=str,
)  # fmt: skip
def test_error_param_uses_client_field_name(http, request_, field):
    path, body = request_
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert not INTERNAL.search(error["message"]), error["message"]
    if path == "messages":
        assert error["message"].startswith(field)
    else:
        assert error["param"] == field or error["param"].startswith(f"{field}.")
        assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("location", "body", "missing", "path"),
    [
        (("a", "list[x]", 0, "text", "text"), {"a": [{"type": "text"}]}, True, "a[0].text"),
        (("a", "text", "text"), {"a": {"text": 5}}, False, "a.text"),
        (("a", "thinking", "signature"), {"a": {"thinking": "x", "signature": 5}}, False,
         "a.signature"),
        (("a", "function-after[f(), B]", "b"), {"a": {"b": 1}}, False, "a.b"),
        (("a", "str"), {"a": 5}, False, "a"),
        (("x",), {}, True, "x"),
        ((), {}, False, ""),
    ],
)  # fmt: skip
def test_error_paths_contain_no_pydantic_names(location, body, missing, path):
    assert format_location(in_body(location, body, missing=missing)) == path
