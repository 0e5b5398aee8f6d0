"""Every error has OpenAI's format, the problem and a solution."""

from __future__ import annotations

import httpx
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def http():
    options = {"unknown_fields": "refuse"}
    with background(ScriptedEngine(), **options) as url, httpx.Client(base_url=url) as client:
        yield client


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.json().keys() == {"error"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": []}, "prompt", "text"),
        ({"prompt": [1, "a"]}, "prompt", "item 0"),
        ({"prompt": [[]]}, "prompt", "non-empty"),
        ({"prompt": [99999]}, "prompt", "vocabulary of 258"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "empty"),
        ({"suffix": "x"}, "suffix", "cannot fill in"),
        ({"best_of": 1, "n": 2}, "best_of", "below n"),
        ({"best_of": 2, "stream": True}, "best_of", "stream"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ""}, "stop", "empty"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "/tokenize"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "did you mean 'include_usage'",
        ),
    ],
)
def test_invalid_completion_requests_return_error_with_param(http, body, param, fragment):
    error = refused(http.post("completions", json={"prompt": "a", **body}))
    assert error["param"] == param
    assert fragment in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "omit it"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differs"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role", "'usr'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "text only",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "starts with the user"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "not a variable",
        ),
    ],
)
def test_invalid_chat_requests_return_error_with_param(http, body, param, fragment):
    error = refused(http.post("chat/completions", json={**CHAT, **body}))
    assert error["param"] == param
    assert fragment in error["message"]


def test_harmless_request_fields_are_accepted(http):
    body = {
        "user": "a",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "tool_choice": "none",
        "tools": None,
        "response_format": {"type": "text"},
        "temperature": None,
        "n": None,
        "stop": None,
    }
    assert http.post("chat/completions", json={**CHAT, **body}).status_code == 200


def test_exceeded_context_length_returns_error_code(http):
    error = refused(http.post("completions", json={"prompt": "a" * 256}))
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    error = refused(http.post("completions", json={"prompt": "a" * 99, "max_tokens": 200}))
    assert error["code"] == "context_length_exceeded"
    assert "at most 156" in error["message"]
    error = refused(http.post("chat/completions", json={**CHAT, "max_tokens": 256}))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    # The default of max_tokens is reduced instead of rejected.
    answer = http.post("completions", json={"prompt": "a" * 250})
    assert answer.json()["usage"]["total_tokens"] == 256


def test_unknown_model_url_method_and_body_return_typed_errors(http):
    error = refused(http.post("completions", json={"prompt": "a", "model": "scriptd"}), 404)
    assert error["code"] == "model_not_found"
    assert "did you mean 'scripted'" in error["message"]
    assert refused(http.post("completion", json={}), 404)["code"] == "unknown_url"
    refused(http.get("completions"), 405)
    error = refused(http.post("completions", content=b'{"prompt": ', headers=JSON))
    assert error["code"] == "invalid_json"
    assert "Content-Type" in refused(http.post("completions", data={"a": "b"}))["message"]
    error = refused(http.post("completions", json={}))
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


JSON = {"Content-Type": "application/json"}


def test_lone_surrogates_in_requests_are_rejected(http):
    for body in (rb'{"prompt": "a\ud800"}', rb'{"prompt": "a", "\ud800": 1}'):
        refused(http.post("completions", content=body, headers=JSON))
    body = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    assert (
        "Unicode" in refused(http.post("chat/completions", content=body, headers=JSON))["message"]
    )


def test_openapi_document_describes_the_completion_request(http):
    schema = http.get("/../openapi.json").json()
    assert "temperature" in schema["components"]["schemas"]["CompletionRequest"]["properties"]


def test_missing_chat_template_error_suggests_completions():
    engine = ScriptedEngine(tokenizer=byte_tokenizer(chat_template=None))
    with background(engine) as url:
        error = refused(httpx.post(f"{url}/chat/completions", json=CHAT))
        assert "/v1/completions" in error["message"]
    with background(engine, chat_template="{{ messages[0].content }}") as url:
        answer = httpx.post(f"{url}/chat/completions", json=CHAT).json()
        assert answer["usage"]["prompt_tokens"] == 2


def test_requests_to_a_dead_engine_return_503():
    engine = ScriptedEngine(fail_after=3)
    with background(engine) as url:
        health = url.replace("/v1", "/health")
        assert httpx.get(health).status_code == 200
        error = refused(httpx.post(f"{url}/completions", json={"prompt": "a"}), 503)
        assert error["code"] == "engine_unavailable"
        for path in ("", "/live", "/ready"):
            assert httpx.get(health + path).status_code == 503
        # A dead engine rejects new requests, streaming or not.
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            answer = httpx.post(f"{url}/completions", json=body)
            refused(answer, 503)
            assert answer.headers["retry-after"]


def test_error_during_a_stream_reaches_the_client():
    with background(ScriptedEngine(lambda prompt, choice: "abcdef", fail_after=3)) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(model="scripted", prompt="a", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="stopped in the middle"):
            texts.extend(chunk.choices[0].text for chunk in stream)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/generate"])
def test_unexpected_errors_announce_the_end_of_the_connection(path):
    def fail(prompt, choice):
        raise RuntimeError("broken")

    with background(ScriptedEngine(fail)) as url, httpx.Client() as client:
        body = {"model": "scripted", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        fields = {"prompt", "model"} if path != "/v1/chat/completions" else {"messages", "model"}
        sent = {key: body[key] for key in fields} | {"stream": False}
        for _ in range(3):
            answer = client.post(url.removesuffix("/v1") + path, json=sent)
            assert answer.status_code == 500
            assert answer.headers["connection"] == "close"
