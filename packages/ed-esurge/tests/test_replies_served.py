"""Calls beside a format, stop strings and any text of a model, in every API with conversations."""

from __future__ import annotations

import json

import httpx
import pytest
from ed_esurge.grammars.store import Grammars
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_esurge.sampling import StructuredOutputs
from ed_esurge.server.generation.reply_formats import ReplyFormats
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.launch import background
from ed_esurge.testing import TOOL_TEMPLATE, ScriptedEngine, byte_tokenizer
from pydantic import ValidationError
from reply_transcripts import EXAMPLES, TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
USER = [{"role": "user", "content": "Go."}]
PARAMETERS = {"type": "object", "properties": {"x": {}, "city": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "A tool.", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
#: API -> route and body of a request with tools.
APIS = {
    "chat": ("/v1/chat/completions", {"messages": USER, "tools": CHAT_TOOLS}),
    "responses": (
        "/v1/responses",
        {"input": "Go.", "tools": [{"type": "function", **FUNCTION}], "store": True},
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 4000,
            "tools": [{"name": "f", "description": "A tool.", "input_schema": PARAMETERS}],
        },
    ),
    "ollama": ("/api/chat", {"messages": USER, "tools": CHAT_TOOLS, "stream": False}),
}
FORMATS = {
    "chat": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    },
    "responses": {"text": {"format": NAMED}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "ollama": {"format": SCHEMA},
}


class OneReply(ScriptedEngine):
    """Answers every request with one text."""

    text = "ok"

    def __init__(self):
        tokenizer = byte_tokenizer(TOOL_TEMPLATE)
        super().__init__(lambda prompt, choice: self.text, tokenizer=tokenizer, max_model_len=8192)


@pytest.fixture(scope="module")
def engine():
    return OneReply()


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def url(engine, request):
    with background(engine, tool_parser_name=request.param) as address:
        yield address.removesuffix("/v1"), request.param


def send(address, api, text, engine, /, **fields):
    engine.text = text
    route, body = APIS[api]
    answer = httpx.post(address + route, json={"model": "scripted", **body, **fields}, timeout=60)
    return answer


# ---- a format and tools


@pytest.mark.parametrize("api", APIS)
def test_model_may_call_although_the_request_has_a_format(engine, url, api):
    address, name = url
    answer = send(address, api, '{"n": 1}', engine, **FORMATS[api])
    assert answer.status_code == 200, answer.text
    params = list(engine.requests.values())[-1]
    assert params.structured_outputs.calls[0] == TOOL_FORMATS[name].opens[0]
    if api == "chat":
        none = send(address, api, "{}", engine, **FORMATS[api], tool_choice="none")
        assert none.status_code == 200
        assert list(engine.requests.values())[-1].structured_outputs.calls == ()


def chat_request(**fields):
    return ChatRequest.model_validate({"model": "m", "messages": USER, **fields})


@pytest.mark.parametrize(
    ("special", "name"),
    [  # the default run has every fourth format as a text, and others as tokens
        pytest.param(
            special,
            name,
            id=f"{'tokens' if special else 'text'}-{name}",
            marks=[] if i % 4 == special else pytest.mark.nightly,
        )
        for special in (False, True)
        for i, name in enumerate(TOOL_FORMATS)
    ],
)
def test_grammar_of_a_format_allows_the_calls_of_every_tool_format(name, special):
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    form = TOOL_FORMATS[name]
    if special:
        markers = [one for one in form.markers if one.startswith("<") and " " not in one]
        tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": schema}}
        for tool, schema in TOOLS.items()
    ]
    formats = ReplyFormats(tokenizer, TOOL_TEMPLATE, tool_parser_name=name)
    starts = formats.call_starts(chat_request(tools=tools))
    wanted = StructuredOutputs(json_schema=json.dumps(SCHEMA), calls=starts)
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def accepts(text):
        matcher = grammars.get(wanted).matcher()
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return all(matcher.consume_token(token) for token in ids)

    assert accepts(EXAMPLES[name])
    assert accepts('{"n": 1}')
    for text in ("Hello", '{"m": 1}', '{"n": 1} and'):
        assert not accepts(text)


def test_beginnings_of_calls_need_a_schema():
    with pytest.raises(ValidationError, match="json_schema"):
        StructuredOutputs(regex="a", calls=("<tool_call>",))
    formats = ReplyFormats(byte_tokenizer(TOOL_TEMPLATE), TOOL_TEMPLATE)
    for fields in ({}, {"tools": CHAT_TOOLS, "tool_choice": "required"}):
        assert formats.call_starts(chat_request(**fields)) == ()


# ---- any text

CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": {v}}}</tool_call>',
    "qwen3_coder": "<tool_call><function=f><parameter=x>\n{v}\n</parameter></function></tool_call>",
}
TEXTS = {
    "half": ('"a \\ud83d b"', "a \ufffd b"),
    "pair": ('"\\ud83d\\ude00"', "\U0001f600"),
    "large": ("1e400", "1e400"),
    "control": ('"a\\tb\\u0000"', "a\tb\u0000"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_of_an_argument_is_answered_and_stored(engine, url, api, text, stream):
    address, name = url
    written, value = TEXTS[text]
    reply = CALLS[name].replace("{v}", written)
    answer = send(address, api, reply, engine, stream=stream)
    assert answer.status_code == 200, answer.text
    assert "Infinity" not in answer.text
    assert "internal_error" not in answer.text
    if stream:
        return
    body = answer.json()
    if api == "responses":
        stored = httpx.get(f"{address}/v1/responses/{body['id']}", timeout=60)
        assert stored.json()["output"] == body["output"]
        (item,) = [one for one in body["output"] if one["type"] == "function_call"]
        arguments = json.loads(item["arguments"])
    elif api == "messages":
        (block,) = [one for one in body["content"] if one["type"] == "tool_use"]
        arguments = block["input"]
    else:
        message = body["message"] if api == "ollama" else body["choices"][0]["message"]
        arguments = message["tool_calls"][0]["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert arguments == {"x": value}


@pytest.mark.parametrize("written", ['{"x": "\\ud83d"}', '{"x": 1e400}', '{"x": "a'])
@pytest.mark.parametrize(
    ("api", "choice"),
    [
        ("chat", {"type": "function", "function": {"name": "f"}}),
        ("responses", {"type": "function", "name": "f"}),
        ("messages", {"type": "tool", "name": "f"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_any_arguments_of_a_forced_call_are_answered(engine, url, api, choice, written, stream):
    answer = send(url[0], api, written, engine, tool_choice=choice, stream=stream)
    assert answer.status_code == 200, answer.text
    assert "internal_error" not in answer.text


# ---- stop strings


@pytest.mark.parametrize("api", ["chat", "messages", "ollama"])
def test_stop_string_within_thoughts_does_not_end_the_reply(engine, url, api):
    stop = {
        "chat": {"stop": ["Step"]},
        "messages": {"stop_sequences": ["Step"]},
        "ollama": {"options": {"stop": ["Step"]}},
    }[api]
    reply = "<think>Step 1. Step 2.</think>Four. Step 3"
    answer = send(url[0], api, reply, engine, **stop)
    assert answer.status_code == 200, answer.text
    assert "Step 1. Step 2." in answer.text
    assert "Four." in answer.text
    assert "Step 3" not in answer.text
