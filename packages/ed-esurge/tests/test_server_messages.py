"""`/v1/messages` through Anthropic's client: blocks, events, tools, token counts."""

from __future__ import annotations

import json
import time

import anthropic
import httpx
import pytest
from ed_esurge.server.launch import background
from ed_esurge.server.messages.endpoint import AnthropicAnswer, AnthropicError
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
    messages = [{"role": "user", "content": f"reply {name}"}]
    options = {"max_tokens": 500, **options}
    return client.messages.create(model="scripted", messages=messages, **options)


def plain(message):
    fields = message.model_dump(exclude_none=True)
    fields.pop("id")
    for block in fields["content"]:
        block.pop("id", None)
    return fields


@pytest.mark.parametrize("name", ["call", "only", "plain", "broken"])
def test_streamed_message_equals_unstreamed_message(client, name):
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
    messages = [{"role": "user", "content": f"reply {name}"}]
    names, arguments = [], ""
    with client.messages.stream(
        model="scripted", messages=messages, tools=TOOLS, max_tokens=500
    ) as stream:
        for event in stream:
            names.append(event.type)
            if event.type == "input_json":
                arguments += event.partial_json
        final = stream.get_final_message()
    if name != "broken":  # the stream has already begun a block for the call
        assert plain(final) == plain(whole)
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        assert names.count("content_block_start") == len(whole.content)
    if name == "only":
        assert arguments == '{"city": "Zürich", "days": 3}{}'


def test_anthropic_history_and_system_reach_the_template(client, engine):
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
                {"type": "text", "text": "reply plain", "cache_control": {"type": "ephemeral"}},
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
    # An answer is a valid message of the conversation.
    sent = [*messages, {"role": "assistant", "content": [b.model_dump() for b in answer.content]}]
    client.messages.create(
        model="scripted", messages=[*sent, {"role": "user", "content": "reply plain"}], max_tokens=9
    )


def test_message_stop_reason_states_why_generation_ended(client):
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


def test_invalid_message_requests_raise_client_errors(client):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(
            model="claude", messages=[{"role": "user", "content": "a"}], max_tokens=1
        )
    for body, fragment in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram", "source": {}}]}]},
            "'hologram' is not supported: use text",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "requires tools"),
    ):
        body = {
            "model": "scripted",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "a"}],
            **body,
        }
        with pytest.raises(anthropic.BadRequestError, match=fragment):
            client.post("/v1/messages", body=body, cast_to=object)


def test_anthropic_key_header_is_accepted(client):
    url = f"{str(client.base_url).rstrip('/')}/v1/messages"
    assert httpx.post(url, json={}).status_code == 401
    assert httpx.post(url, json={}, headers={"x-api-key": "key"}).status_code == 400


def envelope(response, status, kind):
    """Return the error of a response in Anthropic's format."""
    assert response.status_code == status, response.text
    body = AnthropicError.model_validate(response.json())
    assert body.error.type == kind
    assert response.headers["request-id"] == body.request_id
    return body.error.message


def test_every_error_under_messages_has_anthropic_format():
    limits = {"max_body_bytes": 4096, "max_concurrent_requests": 1, "body_timeout": 1.0}
    engine = NamedReplies(delay=0.05)
    body = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    with (
        background(
            engine,
            api_key="key",
            limits=limits,
            allowed_hosts=["127.0.0.1"],
            unknown_fields="refuse",
        ) as url,
        httpx.Client(base_url=url, headers={"x-api-key": "key"}) as http,
    ):
        envelope(http.post("/messages", json=body, headers={"x-api-key": "no"}), 401, AUTH)
        said = envelope(http.post("/messages", json={**body, "messages": [{}]}), 400, INVALID)
        assert said.startswith("messages[0].role")
        assert "tagged" not in said
        envelope(http.post("/messages", json={**body, "typo": 1}), 400, INVALID)
        envelope(http.post("/messages", content=b"{"), 400, INVALID)
        said = envelope(http.post("/messages", json={**body, "model": "b"}), 404, "not_found_error")
        assert "the model 'b' does not exist" in said
        envelope(http.get("/messages"), 405, INVALID)
        envelope(http.get("/messages/batches"), 404, "not_found_error")
        envelope(http.post("/messages", json={**body, "system": "a" * 9000}), 413, TOO_LARGE)
        foreign = {"host": "evil.example"}
        envelope(http.post("/messages", json=body, headers=foreign), 421, INVALID)
        form = {"type": "json_schema", "schema": {"type": "nothing"}}
        said = envelope(
            http.post("/messages", json={**body, "output_config": {"format": form}}), 400, INVALID
        )
        assert said.startswith("output_config.format: ")
        slow = {**body, "stream": True, "messages": [{"role": "user", "content": "reply call"}]}
        with http.stream("POST", "/messages", json=slow) as running:
            assert running.status_code == 200
            envelope(httpx.post(f"{url}/messages", json=body, headers=KEY), 429, "rate_limit_error")
            envelope(
                httpx.post(f"{url}/messages/count_tokens", json=body, headers=KEY),
                429,
                "rate_limit_error",
            )
        # This engine raises for an unknown prompt.
        envelope(until(lambda: http.post("/messages", json=body)), 500, "api_error")
        engine.is_healthy = False
        envelope(httpx.post(f"{url}/messages", json=body, headers=KEY), 503, "overloaded_error")
        # Other paths use OpenAI's format.
        other = httpx.post(f"{url}/chat/completions", json=body, headers=KEY)
        assert set(other.json()) == {"error"}


def until(ask):
    """Return a response after the previous request has ended."""
    while (response := ask()).status_code == 429:
        pass
    return response


KEY = {"x-api-key": "key"}
AUTH, INVALID, TOO_LARGE = "authentication_error", "invalid_request_error", "request_too_large"


def test_stream_error_has_anthropic_format():
    engine = NamedReplies(fail_after=3)
    with background(engine) as url:
        client = anthropic.Anthropic(
            base_url=url.removesuffix("/v1"), api_key="none", max_retries=0
        )
        messages = [{"role": "user", "content": "reply plain"}]
        stream = client.messages.create(
            model="scripted", messages=messages, max_tokens=50, stream=True
        )
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "overloaded_error"


def test_final_assistant_message_is_continued():
    engine = NamedReplies()
    with background(engine) as url:
        continues(
            anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="no", max_retries=0),
            engine,
        )


def continues(client, engine):
    messages = [
        {"role": "user", "content": "reply plain"},
        {"role": "assistant", "content": "It is <b"},
    ]
    options = {"model": "scripted", "messages": messages}
    client.messages.create(**options, max_tokens=9)
    assert engine.prompts[-1].endswith("It is <b")
    count = client.messages.count_tokens(**options).input_tokens
    assert count == len(engine.prompts[-1].encode())
    # The same with blocks.
    blocks = [{"type": "thinking", "thinking": "Hm", "signature": ""}]
    blocks.append({"type": "text", "text": "It is <b"})
    messages[1]["content"] = blocks
    client.messages.create(**options, max_tokens=9)
    assert engine.prompts[-1].endswith("It is <b")
    # An empty message, or one with calls, is not continued.
    for content in (
        "",
        [{"type": "tool_use", "id": "a", "name": "now", "input": {}}],
    ):
        messages[1]["content"] = content
        client.messages.create(**options, max_tokens=9)
        assert engine.prompts[-1].endswith("<|assistant|>")


def test_unsupported_thread_has_the_error_code_that_clients_expect(client):
    ask = {"model": "scripted", "max_tokens": 99, "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(anthropic.BadRequestError, match="send all messages") as caught:
        client.beta.messages.create(**ask, thread={"type": "create"})
    details = caught.value.body["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}


def test_models_have_the_fields_of_anthropic(client):
    listed = [*client.models.list()]  # reads further pages, if there are any
    assert [model.id for model in listed] == ["scripted"]
    (model,) = listed
    assert (model.type, model.display_name) == ("model", "scripted")
    assert abs(time.time() - model.created_at.timestamp()) < 3600
    assert client.models.retrieve("scripted") == model


def test_unknown_beta_fields_are_ignored(client):
    answer = client.beta.messages.create(
        model="scripted",
        max_tokens=9,
        messages=[{"role": "user", "content": "reply plain"}],
        betas=["some-beta-2030-01-01"],
        extra_body={"billing_policy": "a", "some_beta_field": {"type": "auto"}},
    )
    assert answer.stop_reason == "max_tokens"
