"""Unknown request fields follow `unknown_fields`; `null` is the default of every optional field."""

from __future__ import annotations

import logging

import httpx
import pytest
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.http.fields import (
    MAX_CHARACTERS,
    MAX_NAMED,
    History,
    IgnoredKeys,
    RequestBody,
    validate_body,
)
from ed_esurge.server.launch import background
from ed_esurge.server.messages.request import MessagesRequest
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HEADER = "x-ignored-fields"


@pytest.fixture(scope="module")
def http():
    with background(ScriptedEngine()) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_answer_header_lists_the_ignored_fields(http, stream):
    body = {**CHAT, "stream": stream, "temprature": 1, "provider": {"order": []}}
    answer = http.post("chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "temprature, provider"
    body = {**CHAT, "stream": True, "stream_options": {"include_usag": True}}
    assert http.post("chat/completions", json=body).headers[HEADER] == "include_usag"
    assert HEADER not in http.post("chat/completions", json=CHAT).headers


def test_ignored_fields_header_is_bounded_and_printable(http):
    many = {f"key {number}": 1 for number in range(1000)}
    long = {"é\n" + "a" * 100_000: 1}
    answer = http.post("chat/completions", json={**CHAT, **long, **many})
    assert answer.status_code == 200
    named = answer.headers[HEADER]
    assert len(named) < (MAX_NAMED + 1) * (MAX_CHARACTERS + 8)
    assert named.isascii() and named.isprintable()
    assert "(and 993 more)" in named


@pytest.mark.timeout(60)  # quadratic time would be hours
def test_unknown_keys_are_recorded_in_linear_time():
    noted = IgnoredKeys("warn")
    keys = {f"key {number}": None for number in range(200_000)} | {"a" * 4_000_000: None}
    body = validate_body(ChatRequest, {**CHAT, **keys}, noted)
    assert len(body.messages) == 1
    assert noted.header.endswith("(and 199993 more)")


def test_log_lists_an_ignored_field_once(caplog):
    with background(ScriptedEngine()) as url, caplog.at_level(logging.WARNING):
        for _ in range(3):
            httpx.post(f"{url}/chat/completions", json={**CHAT, "some_field": 1})
    said = [record for record in caplog.records if "some_field" in record.getMessage()]
    assert len(said) == 1


def test_policy_selects_ignoring_or_rejecting_unknown_fields():
    with background(ScriptedEngine(), unknown_fields="ignore") as url:
        answer = httpx.post(f"{url}/chat/completions", json={**CHAT, "temprature": 1})
        assert answer.status_code == 200 and HEADER not in answer.headers
    with background(ScriptedEngine(), unknown_fields="refuse") as url:
        answer = httpx.post(f"{url}/chat/completions", json={**CHAT, "temprature": 1})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
        assert "did you mean 'temperature'" in error["message"]
        # Conversations can contain answers of other servers, so their keys are always accepted.
        message = {"role": "assistant", "content": "a", "provider_specific_fields": {}}
        body = {"messages": [*CHAT["messages"], message, *CHAT["messages"]]}
        assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200
    with pytest.raises(ConfigError, match="ignore, warn, refuse"):
        background(ScriptedEngine(), unknown_fields="drop").__enter__()


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("prompt_embeds", "abc", None),
        ("tfs_z", 0.5, 1.0),
        ("repeat_penalty", 1.1, 1.0),
        ("logits_processors", ["x"], []),
        ("chat_template", "{{ 1 }}", None),
        ("documents", [{"text": "a"}], []),
        ("samplers", ["top_k"], None),
        ("echo", True, False),
        ("best_of", 2, 1),
    ],
)
def test_unimplemented_field_that_changes_the_answer_returns_400(http, field, value, harmless):
    answer = http.post("chat/completions", json={**CHAT, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "not supported" in answer.json()["error"]["message"]
    answer = http.post("chat/completions", json={**CHAT, field: harmless})
    assert answer.status_code == 200
    assert HEADER not in answer.headers


BODIES = {endpoint.accepts for endpoint in list_endpoints() if endpoint.accepts is not None}


def _models(kind, known):
    """Yield a model and all models of its fields."""
    if kind in known:
        return known
    known.add(kind)
    todo = [field.annotation for field in kind.model_fields.values()]
    while todo:
        here = todo.pop()
        if isinstance(here, type) and issubclass(here, RequestBody):
            _models(here, known)
        todo += getattr(here, "__args__", ())
    return known


def _all_models():
    known = set()
    for kind in BODIES:
        _models(kind, known)
    return sorted(known, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


@pytest.mark.parametrize("kind", _all_models(), ids=lambda kind: kind.__name__)
def test_null_is_the_default_of_every_optional_field(kind):
    assert issubclass(kind, RequestBody)
    for name, field in kind.model_fields.items():
        if field.is_required():
            continue
        spelled = next((key for key, known in kind.ALIASES.items() if known == name), name)
        kept = kind._without_nulls_and_unknown({spelled: None, "no such key": 1}, _Info())
        assert kept == {}, name


class _Info:
    context = IgnoredKeys("ignore")


def test_null_fields_do_not_change_requests():
    for kind, least in (
        (ChatRequest, CHAT),
        (MessagesRequest, {**CHAT, "model": "m", "max_tokens": 1}),
    ):
        nulls = {name: None for name, f in kind.model_fields.items() if not f.is_required()}
        assert validate_body(kind, {**nulls, **least}) == validate_body(kind, least)


def test_every_message_of_a_conversation_ignores_unknown_keys():
    history = {kind.__name__ for kind in _all_models() if issubclass(kind, History)}
    assert history == {
        *("ChatMessage", "TextPart", "RefusalPart", "ToolCall", "CalledFunction"),
        *("AnthropicMessage", "TextBlock", "ToolUse", "ToolResult", "Thinking"),
        *("ImageBlock", "Base64Source", "URLSource", "ImageInput", "AudioInput"),
        *("ResponsePart", "ImagePart", "ImageURL", "AudioPart", "InputAudio"),
        *("OllamaMessage", "OllamaCall", "FunctionOfCall"),
        *("MessageItem", "CallItem", "ResultItem", "ReasoningItem"),
        *("CustomCallItem", "CustomResultItem", "McpListItem", "McpCallItem"),
        *("ApprovalRequestItem", "ApprovalItem"),
        *("DocumentBlock", "PlainTextSource", "BlocksSource", "StoredFileSource", "SearchResult"),
        *("CompactionBlock", "SkippedBlock", "FileInput", "SkippedItem"),
        *(
            "ClientCallItem",
            "ClientResultItem",
            "HostedTool",
            "ServerTool",
            "VideoPart",
            "VideoURL",
        ),
    }
