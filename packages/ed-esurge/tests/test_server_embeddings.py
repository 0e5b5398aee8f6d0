"""Vectors, scores and ranks over HTTP, through the official client, equal those of the engine."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest
from ed_esurge import PoolingParams
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

TEXTS = ["The cat", "Grüße 世界", "x" * 40, "a"]


@pytest.fixture(scope="module")
def vectors(surge):
    """The vectors of the engine, [n, d], by kind of pooling."""
    kinds = {
        pooling: PoolingParams(pooling=pooling, normalize=True) for pooling in ("last", "mean")
    }
    return {
        pooling: np.stack([output.pooled for output in surge.embed(TEXTS, params)])
        for pooling, params in kinds.items()
    }


@pytest.fixture(scope="module")
def url(surge, vectors):
    with background(surge) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_embeddings_endpoint_returns_engine_vectors(client, surge, vectors):
    for pooling, expected in vectors.items():
        for more in ({}, {"encoding_format": "float"}):  # the client requests base64 by default
            answer = client.embeddings.create(
                model=surge.model_name, input=TEXTS, extra_body={"pooling": pooling}, **more
            )
            got = np.array([item.embedding for item in answer.data])
            np.testing.assert_allclose(got, expected, atol=1e-6)
            assert [item.index for item in answer.data] == [0, 1, 2, 3]
    tokens = [surge.tokenizer(text)["input_ids"] for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    ids = client.embeddings.create(model=surge.model_name, input=tokens)
    np.testing.assert_allclose([i.embedding for i in ids.data], vectors["last"], atol=1e-6)
    one = client.embeddings.create(model=surge.model_name, input=TEXTS[0])
    np.testing.assert_allclose(one.data[0].embedding, vectors["last"][0], atol=1e-6)


def test_base64_vectors_with_fewer_dimensions_are_normalized_again(url, client, surge, vectors):
    body = {"input": TEXTS[1], "encoding_format": "base64", "dimensions": 5}
    data = httpx.post(f"{url}/embeddings", json=body).json()["data"]
    got = np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4")
    expected = vectors["last"][1][:5]
    np.testing.assert_allclose(got, expected / np.linalg.norm(expected), atol=1e-6)
    raw = client.embeddings.create(
        model=surge.model_name, input=TEXTS[1], dimensions=5, extra_body={"normalize": False}
    )
    assert np.linalg.norm(raw.data[0].embedding) != pytest.approx(1)
    with pytest.raises(openai.BadRequestError, match="dimensions of the vectors"):
        client.embeddings.create(model=surge.model_name, input="a", dimensions=10_000)


def test_score_and_rerank_return_cosine_similarities(url, vectors):
    v = vectors["last"].astype(np.float64)
    body = {"text_1": TEXTS[0], "text_2": TEXTS}
    data = httpx.post(f"{url}/score", json=body).json()["data"]
    np.testing.assert_allclose([item["score"] for item in data], v @ v[0], atol=1e-6)
    body = {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}
    data = httpx.post(f"{url}/score", json=body).json()["data"]
    np.testing.assert_allclose(
        [item["score"] for item in data], np.sum(v[:2] * v[2:], axis=1), atol=1e-6
    )
    body = {"query": TEXTS[0], "documents": TEXTS, "top_n": 3}
    ranked = httpx.post(f"{url}/rerank", json=body).json()
    order = np.argsort(-(v @ v[0]), kind="stable")[:3]
    assert [item["index"] for item in ranked["results"]] == order.tolist()
    assert ranked["results"][0]["document"] == {"text": TEXTS[0]}
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1)
    bare = httpx.post(f"{url}/rerank", json={**body, "return_documents": False}).json()
    assert "document" not in bare["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "param", "fragment"),
    [
        ("embeddings", {"input": []}, "input", "text"),
        ("embeddings", {"input": ["a", 1]}, "input", "item 1"),
        ("embeddings", {"input": [9999]}, "input", "vocabulary"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "greater"),
        ("embeddings", {"input": "a", "pooling": "max"}, "pooling", "mean"),
        ("embeddings", {"input": "a" * 300}, "input", "context length"),
        ("embeddings", {"input": ["a"] * 3000}, "input", "2048"),
        ("score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "as many"),
        ("score", {"text_1": [], "text_2": "c"}, "text_1", "at least 1"),
        ("rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
        ("rerank", {"query": "a", "documents": ["b"] * 3000}, "documents", "2048"),
    ],
)
def test_invalid_pooling_requests_return_400_with_param(path, body, param, fragment):
    with background(ScriptedEngine()) as url:
        answer = httpx.post(f"{url}/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert fragment in answer.json()["error"]["message"]


def test_decode_health_check_generates_a_token(url, surge):
    root = url.removesuffix("/v1")
    steps = surge.stats()["num_steps"]
    assert httpx.get(f"{root}/health/decode").json() == {"status": "ok"}
    assert surge.stats()["num_steps"] > steps
    engine = ScriptedEngine(fail_after=0)
    with background(engine) as url:
        answer = httpx.get(f"{url}/../health/decode")
        assert (answer.status_code, answer.json()["status"]) == (503, "down")


def test_concurrent_health_checks_share_one_token():
    import asyncio

    engine = ScriptedEngine(delay=0.3)

    async def many(url):
        async with httpx.AsyncClient() as client:
            return await asyncio.gather(*[client.get(f"{url}/../health/decode") for _ in range(20)])

    with background(engine) as url:
        answers = asyncio.run(many(url))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert len(engine.requests) < 5
