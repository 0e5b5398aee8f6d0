"""Structured output over HTTP with the real engine: answers follow the grammar."""

from __future__ import annotations

import json
import re

import openai
import pytest
from ed_esurge.grammars import store
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from pydantic import BaseModel, Field

pytestmark = pytest.mark.xdist_group("engine-behind-a-server")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "of": {"$ref": "#/$defs/kind"}},
    "required": ["ok", "of"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["a", "b"]}},
}
# Chains of references and of rules.
LINKS = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
CHAIN = json.dumps({"$ref": "#/$defs/d0", "$defs": {**LINKS, "d900": {}}})
RULES = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "x"'
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "second"}},
]


@pytest.fixture(scope="module")
def tokenizer(engine_behind):
    return engine_behind.tokenizer


@pytest.fixture(scope="module")
def client(engine_behind):
    with background(engine_behind, reasoning_parser="deepseek_r1") as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(client, **options):
    messages = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=120, seed=3, **options
    )


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.nightly
def test_response_format_constrains_chat_output(client):
    for format_ in (json_schema(SCHEMA), {"type": "text"}):
        answer = ask(client, response_format=format_, n=3)
        if format_["type"] == "text":
            continue
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            value = json.loads(choice.message.content)
            assert value.keys() == {"ok", "of"}
            assert value["of"] in ("a", "b")
    text = ask(client, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{")


class Answer(BaseModel):
    yes: bool
    pair: list[bool] = Field(min_length=2, max_length=2)


def test_openai_client_parses_structured_answer(client):
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Answer, max_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        ({"guided_regex": "[ab]{2}c"}, "[ab]{2}c"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, "x[yz]"),
        ({"guided_json": {"enum": [1, "two"]}}, '1|"two"'),
        ({"guided_json": '{"const": true}'}, "true"),
        ({"structured_outputs": {"regex": "[ab]{2}c"}}, "[ab]{2}c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" ("y" | "z")'}}, "x[yz]"),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}, "regex": None}}, '1|"two"'),
        ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            r"(?s)\{.*",
        ),
    ],
)
def test_every_guided_option_constrains_the_text(client, guided, pattern):
    text = ask(client, extra_body=guided).choices[0].message.content
    assert re.fullmatch(pattern, text)
    whole = client.completions.create(model="tiny", prompt=["a", "b"], extra_body=guided, n=2)
    assert all(re.fullmatch(pattern, choice.text) for choice in whole.choices)


@pytest.mark.parametrize(
    ("wanted", "param", "fragment"),
    [
        ({"json": {}, "regex": "a"}, "structured_outputs", "exactly one"),
        ({}, "structured_outputs", "exactly one"),
        ({"json_object": False}, "structured_outputs", "exactly one"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag", "not supported"),
        ({"json": {}, "disable_additional_properties": True}, None, "additionalProperties: false"),
        ({"json": "{"}, "structured_outputs.json", "not a JSON schema"),
        ({"json": "[" * 50_000}, "structured_outputs.json", "not a JSON schema"),
        ({"json": '{"a": ' * 40 + "1" + "}" * 40}, "structured_outputs.json", "32 levels"),
        ({"regex": "("}, "structured_outputs.regex", "expression is invalid"),
    ],
)
def test_invalid_structured_outputs_return_400(client, wanted, param, fragment):
    with pytest.raises(openai.BadRequestError, match=fragment) as caught:
        ask(client, extra_body={"structured_outputs": wanted})
    assert param in (None, caught.value.param)


def test_two_structured_outputs_in_one_request_return_400(client):
    with pytest.raises(openai.BadRequestError, match="contradicts"):
        ask(
            client,
            response_format={"type": "json_object"},
            extra_body={"structured_outputs": {"regex": "a"}},
        )


def test_response_format_is_ignored_if_a_call_is_required(client):
    answer = ask(
        client,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "first"}},
        response_format=json_schema({"const": 1}),
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["of"] in ("a", "b")


@pytest.mark.nightly
def test_required_tool_calls_are_enforced_by_a_grammar(client):
    for parallel in (False, True):
        answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        (choice,) = answer.choices
        calls = choice.message.tool_calls
        assert choice.message.content is None
        if choice.finish_reason == "tool_calls":
            assert parallel or len(calls) == 1
            for call in calls:
                arguments = json.loads(call.function.arguments)
                assert call.function.name in ("first", "second")
                assert call.function.name == "second" or arguments["of"] in ("a", "b")
    named = {"type": "function", "function": {"name": "first"}}
    whole = ask(client, tools=TOOLS, tool_choice=named).choices[0]
    assert whole.finish_reason == "stop"
    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments)["of"] in ("a", "b")
    streamed = ["", ""]
    for chunk in ask(client, tools=TOOLS, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            streamed[0] += part.function.name or ""
            streamed[1] += part.function.arguments or ""
    assert streamed == [call.function.name, call.function.arguments]


def test_structured_output_leaves_reasoning_unconstrained(client, tokenizer):
    bias = {str(tokenizer.convert_tokens_to_ids("</think>")): 4}
    answer = ask(
        client,
        response_format=json_schema(SCHEMA),
        logit_bias=bias,
        extra_body={"chat_template_kwargs": {"think": True}},
    )
    message = answer.choices[0].message
    assert message.model_extra["reasoning_content"]
    assert json.loads(message.content)["of"] in ("a", "b")


def tool_of(schema):
    """A tool with one argument."""
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"b": {"type": "thing"}},
    }
    return {"type": "function", "function": {"name": "first", "parameters": parameters}}


@pytest.mark.parametrize(
    ("schema", "fragment"),
    [
        (
            {"uniqueItems": True},
            r"function\.parameters\.properties\.a: the keywords",
        ),
        ({"$ref": "#/$defs/b"}, r"function\.parameters\.\$defs\.b: the type 'thing' is unknown"),
    ],
)
def test_error_of_a_tool_schema_names_the_request_field(client, schema, fragment):
    with pytest.raises(openai.BadRequestError, match=r"at tools\[1\]\." + fragment) as error:
        ask(client, tools=[TOOLS[1], tool_of(schema)], tool_choice="required")
    assert error.value.body["param"] == "tool_choice"


FORMS = {
    "guided_choice": {"extra_body": {"guided_choice": ["yes", "no"]}},
    "tool_choice": {"tools": TOOLS[1:], "tool_choice": "required"},
    "response_format": {"response_format": json_schema({"type": "array", "maxItems": 1})},
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_constrained_answer_is_not_empty_after_early_end_of_thoughts(client, form):
    """At this temperature all tokens are about equally likely, including the end of sequence."""
    options = {**FORMS[form]}
    extra = {**options.pop("extra_body", {}), "chat_template_kwargs": {"think": True}}
    finished = 0
    for choice in ask(client, n=24, temperature=2.0, extra_body=extra, **options).choices:
        message = choice.message
        if choice.finish_reason == "length":
            continue
        finished += 1
        if form == "tool_choice":
            assert [call.function.name for call in message.tool_calls]
        elif form == "guided_choice":
            assert message.content in ("yes", "no")
        else:
            assert isinstance(json.loads(message.content), list)
    assert finished


@pytest.fixture(scope="module")
def scripted():
    with background(ScriptedEngine(max_model_len=4096)) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "requires the type",
        ),
        ({"response_format": json_schema({"type": "thing"})}, "response_format", "thing"),
        ({"guided_regex": "("}, "guided_regex", "structured output"),
        ({"guided_json": '{"items":' * 9000}, "guided_json", "is not a JSON schema"),
        ({"guided_json": CHAIN}, "guided_json", "levels deep along its references"),
        ({"guided_grammar": RULES}, "guided_grammar", "levels deep along its references"),
        ({"guided_regex": "(" * 9000 + ")" * 9000}, "guided_regex", "nested parentheses"),
        (
            {"response_format": json_schema({"items": {"oneOf": [{}, {}]}})},
            "response_format",
            "at $.items: `oneOf` is supported only where",
        ),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice", "1024"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar", "contradicts"),
        ({"guided_regex": "a", "min_tokens": 3}, None, "drop one"),
    ],
)
def test_invalid_structured_requests_return_400_with_param(scripted, body, param, fragment):
    body = {"messages": [{"role": "user", "content": "a"}], **body}
    with pytest.raises(openai.BadRequestError) as error:
        scripted.post("/chat/completions", body=body, cast_to=object)
    assert error.value.body["param"] == param
    assert fragment in error.value.body["message"]


def test_too_many_queued_grammars_return_503(scripted, monkeypatch):
    monkeypatch.setattr(store, "MAX_WAITING", 0)
    body = {"messages": [{"role": "user", "content": "a"}], "guided_regex": "never seen before"}
    with pytest.raises(openai.InternalServerError, match="wait to be compiled") as error:
        scripted.post("/chat/completions", body=body, cast_to=object)
    assert error.value.status_code == 503
    assert error.value.body["code"] == "server_busy"
    assert error.value.response.headers["Retry-After"] == "1"


def test_deeply_nested_schemas_are_rejected(scripted):
    schema = {"type": "object"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "response_format": json_schema(schema)}
    with pytest.raises(openai.BadRequestError, match="deeper"):
        scripted.post("/chat/completions", body=body, cast_to=object)


#: Fields of llama.cpp, SGLang and text-generation-inference, and the format of the answer.
OTHER_NAMES = {
    "grammar": ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    "ebnf": ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
    "regex": ({"regex": "[ab]{3}"}, "[ab]{3}"),
    "json_schema": ({"json_schema": {"enum": ["x", "y"]}}, '"[xy]"'),
    "json_schema as text": ({"json_schema": '{"enum": ["x", "y"]}'}, '"[xy]"'),
    "bare schema": (
        {"response_format": {"type": "json_object", "schema": {"const": 7}}},
        "7",
    ),
    "schema without name": (
        {"response_format": {"type": "json_schema", "schema": {"const": 7}}},
        "7",
    ),
    "value": ({"response_format": {"type": "json_object", "value": {"const": 7}}}, "7"),
    "empty grammar": ({"grammar": "", "regex": "a"}, "a"),
}


@pytest.mark.daily("grammar", "bare schema")
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_known_fields_of_other_servers_constrain_the_answer(client, name):
    fields, pattern = OTHER_NAMES[name]
    assert re.fullmatch(pattern, ask(client, extra_body=fields).choices[0].message.content)
    if "response_format" not in fields:
        answer = client.completions.create(
            model="tiny", prompt="hi", max_tokens=20, extra_body=fields
        )
        assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": "no"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "no"}}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"grammar": 'root ::= "a"', "guided_regex": "a"}, "grammar"),
    ],
)
def test_broken_values_of_known_fields_are_errors(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, extra_body=fields)
    assert error.value.param == param, error.value
