"""Tools and reasoning through the official client: streamed = unstreamed."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from ed_esurge.server import create_app
from ed_esurge.server.generation import answers
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import (
    CHAT_TEMPLATE,
    TOOL_CALLS,
    TOOL_PARAMETERS,
    TOOL_REPLIES,
    TOOL_TEMPLATE,
    NamedReplies,
    ScriptedEngine,
    byte_tokenizer,
)
from ed_infra.errors import ConfigError

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": TOOL_PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


@pytest.fixture(scope="module")
def engine():
    return NamedReplies(tokenizer=byte_tokenizer(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def client(engine):
    with background(engine) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(client, name, **options):
    messages = [{"role": "user", "content": f"reply {name}"}]
    return client.chat.completions.create(model="scripted", messages=messages, **options)


def joined(stream):
    """Return the joined content of a stream."""
    content, reasoning, calls, finish, chunks = "", "", {}, None, 0
    for chunk in stream:
        for choice in chunk.choices:
            chunks += 1
            delta = choice.delta
            content += delta.content or ""
            reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls)
                    assert (call.type, call.function.arguments) == ("function", "")
                    calls[call.index] = [call.function.name, "", 0]
                else:
                    assert call.function.name is None
                    calls[call.index][1] += call.function.arguments
                    calls[call.index][2] += 1
            finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


def whole(answer):
    message = answer.choices[0].message
    answers.ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = (message.model_extra or {}).get("reasoning_content") or ""
    return message.content, reasoning, calls, answer.choices[0].finish_reason


WEATHER = ("weather", '{"city": "Zürich", "days": 3}')


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("call", ("One moment.", "I look it up.", [WEATHER, ("now", "{}")], "tool_calls")),
        ("only", (None, "", [WEATHER, ("now", "{}")], "tool_calls")),
        ("plain", (TOOL_REPLIES["plain"], "", [], "stop")),
        ("broken", (TOOL_REPLIES["broken"], "", [], "stop")),
        ("unknown", (TOOL_REPLIES["unknown"], "", [], "stop")),
    ],
)
def test_streamed_tool_calls_equal_unstreamed_tool_calls(client, name, expected):
    assert whole(ask(client, name, tools=TOOLS)) == expected
    content, reasoning, calls, finish = joined(ask(client, name, tools=TOOLS, stream=True))
    complete = [(n, text) for n, text, _ in calls.values() if _is_json(text)]
    assert (content or None, reasoning, complete, finish) == expected
    if name in ("call", "only"):
        assert calls[0][2] > 10  # arguments arrive while they are written
    with client.chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": f"reply {name}"}], tools=TOOLS
    ) as stream:
        final = stream.get_final_completion()
    assert [c.function.name for c in final.choices[0].message.tool_calls or []][
        : len(complete)
    ] == [n for n, _ in complete]


def _is_json(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_streamed_tool_calls_of_every_choice_have_all_token_ids_and_logprobs(client):
    extra = {"return_token_ids": True}
    options = {"tools": TOOLS, "n": 2, "logprobs": True, "extra_body": extra}
    answer = ask(client, "call", **options)
    ids = [choice.model_extra["token_ids"] for choice in answer.choices]
    assert ids[0] == ids[1]
    streamed, scores = {0: [], 1: []}, {0: 0, 1: 0}
    for chunk in ask(
        client, "call", tools=TOOLS, n=2, logprobs=True, stream=True, extra_body=extra
    ):
        for choice in chunk.choices:
            streamed[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            scores[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert [*streamed.values()] == ids
    assert scores == {0: len(ids[0]), 1: len(ids[0])}
    assert len({call.id for c in answer.choices for call in c.message.tool_calls}) == 4


def test_parallel_tool_calls_false_returns_one_call(client):
    content, _, calls, finish = whole(ask(client, "only", tools=TOOLS, parallel_tool_calls=False))
    assert (content, calls, finish) == (None, [WEATHER], "tool_calls")
    _, _, calls, _ = joined(
        ask(client, "only", tools=TOOLS, parallel_tool_calls=False, stream=True)
    )
    assert len(calls) == 1


def test_truncated_tool_call_returns_partial_arguments(client):
    content, _, calls, finish = whole(ask(client, "only", tools=TOOLS, max_tokens=60))
    assert (content, finish) == (None, "length")
    assert WEATHER[1].startswith(calls[0][1])
    got = joined(ask(client, "only", tools=TOOLS, max_tokens=60, stream=True))
    assert [(n, text) for n, text, _ in got[2].values()] == calls


def test_allowed_tools_restrict_the_tools_of_a_chat(client, engine):
    names = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names}}
    answer = ask(client, "only", tools=TOOLS, tool_choice=choice)
    assert '"weather"' not in engine.prompts[-1].split("</tools>")[0]
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["now"]
    names[0] = {"type": "function", "function": {"name": "storm"}}
    with pytest.raises(openai.BadRequestError, match="'storm' is not among the tools"):
        ask(client, "only", tools=TOOLS, tool_choice=choice)


def test_text_is_unchanged_without_tools_or_with_tool_choice_none(client, engine):
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        content, _, calls, finish = whole(ask(client, "only", **options))
        assert (content, calls, finish) == (TOOL_CALLS, [], "stop")
        assert "<tools>" not in engine.prompts[-1]


def test_chat_template_receives_tool_call_history(client, engine):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages = [
        {"role": "user", "content": "Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
        {"role": "user", "content": "reply plain"},
    ]
    client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    text = engine.prompts[-1]
    offered = json.loads(text[text.index("[") : text.index("</tools>")])
    assert offered[0]["function"]["parameters"] == TOOL_PARAMETERS
    assert offered[1]["function"]["description"] == "The time."
    lines = [json.loads(line[line.index("|>") + 2 :]) for line in text.split("\n")[1:3]]
    assert lines[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert lines[0]["reasoning_content"] == "Hm"
    assert lines[1] == {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"}
    # An answer is a valid message of the conversation.
    answer = ask(client, "call", tools=TOOLS)
    messages[1] = answer.choices[0].message.model_dump()
    client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)


def test_thoughts_begun_by_the_template_are_parsed(client):
    think = {"chat_template_kwargs": {"think": True}}
    assert whole(ask(client, "inside", extra_body=think))[:2] == ("Sunny.", "I look.")
    assert joined(ask(client, "inside", extra_body=think, stream=True))[:2] == ("Sunny.", "I look.")


F = {"type": "function", "function": {"name": "f"}}
BAD_NAME = {"type": "function", "function": {"name": "a b"}}


def called(role, arguments):
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": role, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"tools": [TOOLS[0]] * 2}, "tools", "two functions"),
        ({"tools": TOOLS * 65}, "tools", "128"),
        ({"tools": [{"type": "code"}]}, "tools[0].type", "function"),
        ({"tools": [BAD_NAME]}, "tools[0].function.name", "pattern"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", ""),
        ({"tools": TOOLS, "tool_choice": F}, "tool_choice", "not among"),
        ({"messages": [{"role": "tool"}]}, "messages[0].tool_call_id", "missing"),
        (called("user", "{}"), "messages[0].tool_calls", "assistant"),
        (called("assistant", "[1]"), "messages[0].tool_calls[0]", "not a JSON object"),
    ],
)
def test_invalid_tool_requests_return_400_with_param(client, body, param, fragment):
    body = {"messages": [{"role": "user", "content": "reply plain"}], **body}
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/chat/completions", body=body, cast_to=object)
    assert (error.value.body["param"] or "").startswith(param)
    assert fragment in error.value.body["message"]


def test_oversized_tool_schemas_are_rejected(client):
    deep: dict = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    for schema, fragment in ((deep, "deeper"), (wide, "larger")):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(openai.BadRequestError, match=fragment):
            ask(client, "plain", tools=[tool])


def test_marker_tokens_are_parsed_and_other_special_tokens_removed():
    tokenizer = byte_tokenizer(TOOL_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[IMG]"]})
    reply = '[IMG]Yes.[TOOL_CALLS]weather{"city": "a"}'
    engine = ScriptedEngine(lambda prompt, choice: reply, tokenizer=tokenizer, max_model_len=8192)
    with background(engine, reasoning_parser="none") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        expected = ("Yes.", "", [("weather", '{"city": "a"}')], "tool_calls")
        assert whole(ask(client, "x", tools=TOOLS)) == expected
        assert whole(ask(client, "x"))[0] == 'Yes.weather{"city": "a"}'


def test_parser_options_override_the_detected_parsers():
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    with background(NamedReplies(tokenizer=tokenizer), enable_function_calling=False) as url:
        body = {"messages": [{"role": "user", "content": "reply only"}], "tools": TOOLS}
        answer = httpx.post(f"{url}/chat/completions", json=body)
        assert answer.status_code == 400
        assert "enable_function_calling" in answer.json()["error"]["message"]
    with background(NamedReplies(tokenizer=tokenizer), tool_parser_name="none") as url:
        answer = httpx.post(f"{url}/chat/completions", json=body)
        assert "tool_parser_name" in answer.json()["error"]["message"]
    options = {"tool_parser_name": "qwen3_coder", "reasoning_parser": "none"}
    with background(NamedReplies(tokenizer=tokenizer), **options) as url:
        body["messages"][0]["content"] = "reply call"
        answer = httpx.post(f"{url}/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == TOOL_REPLIES["call"]
    with pytest.raises(ConfigError, match="hermes"):
        create_app(NamedReplies(tokenizer=tokenizer), tool_parser_name="hermse")


PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_templates_that_require_parts_receive_parts():
    engine = NamedReplies(tokenizer=byte_tokenizer(PARTS))
    with background(engine) as url:
        ask(openai.OpenAI(base_url=url, api_key="none"), "plain")
    assert engine.prompts[-1] == "<|user|>reply plain<|assistant|>"
    engine = ScriptedEngine(tokenizer=byte_tokenizer(PARTS))
    with background(engine, oai_like_processor=False) as url:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        tokens = httpx.post(f"{url}/../tokenize", json=body).json()["tokens"]
        assert engine.tokenizer.decode(tokens) == "<|user|><|assistant|>"


NO_SYSTEM = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module", params=[CHAT_TEMPLATE, NO_SYSTEM], ids=["system", "no-system"])
def served(request):
    engine = NamedReplies(tokenizer=byte_tokenizer(request.param))
    with background(engine) as url:
        yield engine, openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_tools_as_text_are_called_equally_in_streams_and_answers(served):
    engine, client = served
    expected = ("tool_calls", [WEATHER, ("now", "{}")])
    content, _, calls, finish = whole(ask(client, "only", tools=TOOLS))
    assert (finish, calls, content) == (*expected, None)
    prompt = engine.prompts[-1]
    listed = prompt[prompt.index("<tools>\n") + 8 : prompt.index("\n</tools>\n\nFor")]
    names = [json.loads(line)["function"]["name"] for line in listed.splitlines()]
    assert names == ["weather", "now"]
    content, _, calls, finish = joined(ask(client, "only", tools=TOOLS, stream=True))
    assert (finish, [tuple(call[:2]) for call in calls.values()]) == expected
    assert whole(ask(client, "broken", tools=TOOLS))[0] == TOOL_REPLIES["broken"]
    ask(client, "only", tools=TOOLS, tool_choice="none")
    assert "<tools>" not in engine.prompts[-1]


def test_results_of_tools_as_text_are_messages_of_the_user(served):
    engine, client = served
    answer = ask(client, "only", tools=TOOLS).choices[0].message
    asked = {"role": "user", "content": "Zürich?"}
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {place}"}
        for place, call in enumerate(answer.tool_calls)
    ]
    messages = [asked, answer.model_dump(), *results, {"role": "user", "content": "reply plain"}]
    client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    prompt = engine.prompts[-1]
    history = prompt[prompt.index("Zürich?") :]
    assert history == (
        f"Zürich?\n<|assistant|>{TOOL_REPLIES['only']}\n"
        "<|user|><tool_response>\nresult 0\n</tool_response>\n"
        "<tool_response>\nresult 1\n</tool_response>\n\nreply plain\n<|assistant|>"
    )
    client.chat.completions.create(model="scripted", messages=messages)  # without tools
    assert "<tool_response>" in engine.prompts[-1]


def test_tools_as_text_follow_the_system_prompt():
    template = ChatTemplate(byte_tokenizer())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    text, _ = template.render(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert text.startswith("<|system|>Be brief.\n\n# Tools\n")
    assert text.endswith("</tool_call>\n<|user|>a\n<|assistant|>")
    assert template.render(messages)[0] == "<|system|>Be brief.\n<|user|>a\n<|assistant|>"


def test_another_tool_format_requires_a_template_that_renders_tools():
    with background(NamedReplies(), tool_parser_name="mistral") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="supports tools"):
            ask(client, "only", tools=TOOLS)


def test_a_named_template_serves_chats_of_a_model_without_a_template():
    engine = NamedReplies(tokenizer=byte_tokenizer(None))
    with background(engine, chat_template="chatml") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert whole(ask(client, "only", tools=TOOLS))[2] == [WEATHER, ("now", "{}")]
    assert engine.prompts[-1].startswith("<|im_start|>system\n# Tools")
    assert engine.prompts[-1].endswith("<|im_end|>\n<|im_start|>assistant\n")
