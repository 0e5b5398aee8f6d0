"""Routes with vLLM's paths and formats."""

from __future__ import annotations

import json

import httpx
import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.server.generation import answers
from ed_esurge.server.launch import background
from ed_esurge.server.openai.ranking import Reranked, ScoreList
from ed_esurge.testing import ScriptedEngine


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(lambda prompt, choice: "abcd")


@pytest.fixture(scope="module")
def http(engine):
    with background(engine, api_key="key", admin_api_key="admin") as url:
        root = url.removesuffix("/v1")
        with httpx.Client(base_url=root, headers={"Authorization": "Bearer key"}) as client:
            yield client


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_is_served_at_every_path(http, path):
    body = {"query": "ab", "documents": ["zzz", "ab", "abc"], "top_n": 0}
    answer = Reranked.model_validate(http.post(path, json=body).json())
    assert len(answer.results) == 3
    assert answer.results[0].index == 1
    assert answer.results[0].document.text == "ab"
    (best,) = http.post(path, json={**body, "top_n": 1}).json()["results"]
    assert best["index"] == 1


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("text_1", "text_2"),
        ("data_1", "data_2"),
        ("queries", "documents"),
        ("queries", "items"),
    ],
)
def test_score_is_served_at_every_path_with_every_field_name(http, path, left, right):
    answer = http.post(path, json={left: "ab", right: ["ab", "zz"]})
    scores = ScoreList.model_validate(answer.json()).data
    assert scores[0].score == pytest.approx(1) and scores[1].score < 0.99
    error = http.post(path, json={left: "ab", right: [5]}).json()["error"]
    assert error["param"] == f"{right}[0]"


def test_ping_reports_whether_requests_are_accepted(http, engine):
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{http.base_url}/ping")  # without a key
        assert (answer.status_code, answer.content) == (200, b"")
        engine.is_sleeping = True
        assert httpx.request(method, f"{http.base_url}/ping").status_code == 503
        engine.is_sleeping = False


def test_load_endpoint_counts_running_requests(http):
    assert httpx.get(f"{http.base_url}/load").json() == {"server_load": 0}
    slow = ScriptedEngine(delay=0.05)
    with background(slow) as url:
        body = {"prompt": "a", "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body):
            load = httpx.get(url.replace("/v1", "/load"))
            assert answers.Load.model_validate(load.json()).server_load == 1


def test_tokenizer_info_returns_the_tokenizer_configuration(http, engine):
    told = http.get("/tokenizer_info").json()
    assert told["tokenizer_class"] == type(engine.tokenizer).__name__
    assert told["chat_template"] == engine.tokenizer.chat_template
    assert told["bos_token"] == "<s>"
    assert not any(key.endswith(("_file", "_path", "_object")) for key in told)
    assert httpx.get(f"{http.base_url}/tokenizer_info").status_code == 401
    assert http.get("/tokenizer_info", params={"model": "x"}).status_code == 404


def test_reset_prefix_cache_route_resets_selected_models(http, engine):
    before = engine.resets
    options = {"reset_running_requests": "true", "reset_external": "true", "model": "scripted"}
    assert http.post("/reset_prefix_cache", params=options).status_code == 403
    http = httpx.Client(base_url=http.base_url, headers={"Authorization": "Bearer admin"})
    answer = http.post("/reset_prefix_cache", params=options)
    assert (answer.status_code, answer.content) == (200, b"")
    assert engine.resets == before + 1
    assert http.post("/reset_prefix_cache", params={"device": "gpu"}).status_code == 400
    assert http.post("/reset_prefix_cache", params={"model": "x"}).status_code == 404
    assert httpx.post(f"{http.base_url}/reset_prefix_cache").status_code == 401


def chunks(http, path, body):
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_continuous_usage_adds_token_counts_to_every_chunk(http, path, body):
    both = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(http, path, {**body, "stream_options": both})
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts)
    assert counts[0] <= 1 and counts[-1] == counts[-2] == 5 * body.get("n", 1)
    assert len(set(counts)) > 3
    for chunk in got:
        answers.Usage.model_validate(chunk["usage"])
    # As in vLLM, the counts require include_usage.
    alone = {"include_usage": False, "continuous_usage_stats": True}
    got = chunks(http, path, {**body, "stream_options": alone})
    assert all(chunk.get("usage") is None for chunk in got)


def test_every_route_reports_truncated_prompts():
    config = EngineConfig(auto_truncate_prompt=True)
    text = "a" * 1000
    bodies = {
        "completions": {"prompt": text},
        "chat/completions": {"messages": [{"role": "user", "content": text}]},
        "responses": {"input": text},
        "messages": {
            "model": "scripted",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": text}],
        },
        "embeddings": {"input": text},
        "score": {"text_1": text, "text_2": "b"},
        "rerank": {"query": "b", "documents": [text]},
    }
    with background(ScriptedEngine(config=config)) as url:
        for path, body in bodies.items():
            answer = httpx.post(f"{url}/{path}", json=body)
            assert answer.status_code == 200, answer.text
            cut = int(answer.headers["x-truncated-prompt-tokens"])
            assert cut >= 744
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            assert (details or usage)["truncated_tokens"] == cut
    with background(ScriptedEngine(config=EngineConfig())) as url:
        for path, body in bodies.items():
            answer = httpx.post(f"{url}/{path}", json=body)
            assert answer.status_code == 400, path
            assert "maximum context length is 256" in answer.json()["error"]["message"]
            assert "x-truncated-prompt-tokens" not in answer.headers
        kept = {"prompt": text, "truncate_prompt_tokens": 10}
        answer = httpx.post(f"{url}/completions", json=kept)
        assert answer.headers["x-truncated-prompt-tokens"] == "991"
        assert httpx.post(f"{url}/completions", json={"prompt": "a"}).json()["usage"][
            "prompt_tokens_details"
        ] == {"cached_tokens": 0}
