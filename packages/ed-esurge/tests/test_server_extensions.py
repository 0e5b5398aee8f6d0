"""Extensions of OpenAI's API with vLLM's names, and the OpenAPI document."""

from __future__ import annotations

import json

import httpx
import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.server import openapi
from ed_esurge.server.generation import answers
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION = {"prompt": "hi", "max_tokens": 4}
BOTH = pytest.mark.parametrize(
    ("url", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(config=EngineConfig(scheduling_policy="priority"))


@pytest.fixture(scope="module")
def http(engine):
    with background(engine) as url, httpx.Client(base_url=url) as client:
        yield client


def chunks(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@BOTH
def test_extension_options_reach_the_engine(http, engine, url, body):
    more = {
        "allowed_token_ids": [65, 66],
        "bad_words": ["x", "\n"],
        "priority": -3,
        "cache_salt": "mine",
        "request_id": "abc/1",
        "prompt_logprobs": 2,
    }
    answer = http.post(url, json={**body, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"].endswith("cmpl-abc/1")
    assert answer.headers["x-request-id"] == answer.json()["id"]
    name, params = list(engine.requests.items())[-1]
    assert "abc/1" in name
    assert params.allowed_token_ids == (65, 66)
    assert params.bad_words == ("x", "\n")
    assert params.prompt_logprobs == 2
    assert engine.options[name] == {"priority": -3, "cache_salt": "mine"}


@BOTH
def test_answer_contains_requested_token_ids_and_prompt_logprobs(http, url, body):
    more = {"return_token_ids": True, "logprobs": 1, "n": 2}
    if "messages" in body:
        more |= {"logprobs": True, "top_logprobs": 1}
    whole = http.post(url, json={**body, **more, "prompt_logprobs": 1}).json()
    kind = answers.ChatCompletion if "messages" in body else answers.Completion
    kind.model_validate(whole)
    top = whole if "messages" in body else whole["choices"][0]
    prompt = top["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    scores = top["prompt_logprobs"]
    assert scores[0] is None
    assert [next(iter(entry)) for entry in scores[1:]] == [str(token) for token in prompt[1:]]
    entry = scores[1][str(prompt[1])]
    assert (entry["rank"], entry["logprob"]) == (1, pytest.approx(-0.6931, abs=1e-3))
    streamed, prompts = {0: [], 1: []}, []
    for chunk in chunks(http.post(url, json={**body, **more, "stream": True})):
        prompts += [part for part in [chunk, *chunk["choices"]] if "prompt_token_ids" in part]
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert [choice["token_ids"] for choice in whole["choices"]] == list(streamed.values())
    assert prompts[0]["prompt_token_ids"] == prompt


@BOTH
def test_truncate_prompt_tokens_truncates_prompts(http, url, body):
    ids = http.post(url, json={**body, "return_token_ids": True}).json()
    ids = ids.get("prompt_token_ids") or ids["choices"][0]["prompt_token_ids"]
    cut = http.post(
        url, json={**body, "truncate_prompt_tokens": 2, "return_token_ids": True}
    ).json()
    assert (cut.get("prompt_token_ids") or cut["choices"][0]["prompt_token_ids"]) == ids[-2:]
    assert cut["usage"]["prompt_tokens"] == 2
    whole = http.post(url, json={**body, "truncate_prompt_tokens": -1}).json()
    assert whole["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "omit stream"),
        ({"prompt_logprobs": 21}, "20"),
        ({"truncate_prompt_tokens": 0}, "-1"),
        ({"allowed_token_ids": []}, "no token could be sampled"),
        ({"allowed_token_ids": [9999]}, "vocabulary"),
        ({"bad_words": [""]}, "empty"),
        ({"request_id": "a\nb"}, "pattern"),
        ({"request_id": "a" * 200}, "pattern"),
        ({"cache_salt": ""}, "at least 1"),
        ({"priority": 2**31}, "less than"),
    ],
)
@BOTH
def test_invalid_extension_options_return_error_with_field(http, url, body, more, fragment):
    answer = http.post(url, json={**body, **more})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == next(iter(more))
    assert fragment in error["message"]


def test_priority_without_effect_returns_400():
    with background(ScriptedEngine()) as url:
        answer = httpx.post(f"{url}/completions", json={**COMPLETION, "priority": 1})
        assert answer.json()["error"]["param"] == "priority"
        assert httpx.post(f"{url}/completions", json={**COMPLETION, "priority": 0}).is_success


def test_routes_answer_head_and_send_allow_header(http):
    for path in ("/health", "/v1/models", "/metrics", "/version"):
        answer = http.head(f"/..{path}")
        assert (answer.status_code, answer.content) == (200, b"")
    answer = http.get("completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = http.delete("models")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("path", ["docs", "redoc", "docs/oauth2-redirect"])
def test_pages_load_no_scripts_from_other_hosts(http, path):
    assert http.get(f"/../{path}").status_code == 404


def test_openapi_document_lists_every_route(http):
    schema = http.get("/../openapi.json").json()
    served = {route.path for route in http_app().routes if getattr(route, "methods", None)} - {
        "/openapi.json"
    }
    assert {path.replace("{model}", "{model:path}") for path in schema["paths"]} == served
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for response in operation["responses"].values():
                assert response["content"], path
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    for status in ("400", "401", "408", "413", "429", "503"):
        shape = chat["responses"][status]["content"]["application/json"]["schema"]
        assert shape == {"$ref": "#/components/schemas/Error"}
    names = json.dumps(schema).split('"#/components/schemas/')[1:]
    assert {name.split('"')[0] for name in names} <= set(schema["components"]["schemas"])


def http_app():
    from ed_esurge.server import create_app

    return create_app(ScriptedEngine())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None),
        ("/v1/models/scripted", None),
        ("/health", None),
        ("/health/decode", None),
        ("/version", None),
        ("/v1/responses", {"input": "a"}),
        (
            "/v1/messages",
            {"model": "scripted", "max_tokens": 4, "messages": CHAT["messages"]},
        ),
        ("/v1/messages/count_tokens", {"model": "scripted", "messages": CHAT["messages"]}),
        ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 3}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/completions", {**COMPLETION, "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_answers_validate_against_documented_models(http, path, body):
    models = {one.path: one.returns for one in openapi.list_endpoints() if one.method != "DELETE"}
    model = models.get(path, answers.ModelCard)
    answer = http.get(f"/..{path}") if body is None else http.post(f"/..{path}", json=body)
    assert answer.status_code == 200
    model.model_validate(answer.json())
