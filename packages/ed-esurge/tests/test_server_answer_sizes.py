"""Answers have a bound before the engine receives a request, and are written in pieces."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import httpx
import numpy as np
import pytest
from ed_esurge.config import ServerLimits
from ed_esurge.server.app import create_app
from ed_esurge.server.generation.pooled_requests import EncodingFields
from ed_esurge.server.http import json_parts
from ed_esurge.server.http.json_parts import JsonItems, JsonText, encode_json, write_json
from ed_esurge.testing import ScriptedEngine
from ed_infra.enums import TaskType

MOST = 2**18
USER = {"messages": [{"role": "user", "content": "a"}]}
LARGE = {
    "prompt scores": ("/v1/completions", {"prompt": "a" * 200, "prompt_logprobs": 20}),
    "repeated scores": (
        "/v1/completions",
        {"prompt": "a" * 20, "prompt_logprobs": 20, "n": 32, "max_tokens": 1},
    ),
    "echo": (
        "/v1/completions",
        {"prompt": "a" * 200, "echo": True, "logprobs": 20, "max_tokens": 0},
    ),
    "streamed echo": (
        "/v1/completions",
        {"prompt": "a" * 200, "echo": True, "logprobs": 20, "stream": True, "n": 2},
    ),
    "best of": ("/v1/completions", {"prompt": "a", "best_of": 128, "max_tokens": 20}),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 8}),
    "prompts with scores": ("/v1/completions", {"prompt": ["a"] * 99, "logprobs": 5}),
    "choices": (
        "/v1/chat/completions",
        {**USER, "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 9},
    ),
    "plain choices": ("/v1/chat/completions", {**USER, "n": 128, "max_tokens": 200}),
    "streamed choices": (
        "/v1/chat/completions",
        {**USER, "n": 128, "logprobs": True, "max_tokens": 200, "stream": True},
    ),
    "prompt scores of a chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a" * 200}], "prompt_logprobs": 20},
    ),
    "response": (
        "/v1/responses",
        {
            "input": "a",
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 50,
        },
    ),
    "llama.cpp": ("/completion", {"prompt": "a", "n_predict": 200, "n_probs": 20}),
    "Ollama": (
        "/api/generate",
        {
            "model": "scripted",
            "prompt": "a",
            "logprobs": True,
            "top_logprobs": 20,
            "options": {"num_predict": 200},
        },
    ),
    "vectors": ("/v1/embeddings", {"input": ["a"] * 2048}),
    "token vectors": ("/pooling", {"input": ["a" * 100] * 9, "task": "token_embed"}),
    "pooled vectors": ("/pooling", {"input": ["a"] * 2048}),
    "Ollama vectors": ("/api/embed", {"model": "scripted", "input": ["a"] * 2048}),
    "scores": ("/v1/score", {"text_1": "a", "text_2": ["a"] * 2048}),
    "ranks": ("/v1/rerank", {"query": "a", "documents": ["a"] * 2048}),
    "token texts": ("/tokenize", {"prompt": "a" * 20_000, "return_token_strs": True}),
}


def serve(engine=None, **limits):
    engine = engine or ScriptedEngine()
    app = create_app(engine, limits=limits)
    transport = httpx.ASGITransport(app)
    return (
        engine,
        app.state.server.state,
        httpx.AsyncClient(transport=transport, base_url="http://a"),
    )


@pytest.mark.parametrize("name", LARGE)
def test_large_answers_are_refused_before_the_engine_receives_the_request(name):
    path, body = LARGE[name]

    async def work():
        engine = ScriptedEngine(max_model_len=2**15)
        if name == "token vectors":
            engine.task = TaskType.EMBEDDING
        _, state, client = serve(engine, max_answer_bytes=MOST)
        async with client:
            answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text[:300]
        assert "max_answer_bytes" in answer.text and str(MOST) in answer.text
        assert not engine.requests and not engine.options
        assert state.budget.used == 0

    asyncio.run(work())


def test_omitted_number_of_tokens_is_reduced_to_the_limit_of_answers():
    async def work():
        engine = ScriptedEngine(lambda prompt, _: "x" * 500, max_model_len=2**12)
        _, state, client = serve(engine, max_answer_bytes=2**16)
        async with client:
            body = {**USER, "logprobs": True, "top_logprobs": 3}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            most = 2**16 // (64 + 4 * 256)
            assert answer["usage"]["completion_tokens"] == most
            assert answer["choices"][0]["finish_reason"] == "length"
            body = {**body, "logprobs": False, "top_logprobs": None}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == 501
        assert state.budget.used == 0

    asyncio.run(work())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_bytes_of_growing_answers_are_in_flight_until_the_answer_ends(path):
    async def work():
        engine = ScriptedEngine(lambda prompt, _: "x" * 3000, max_model_len=2**13)
        limits = {"max_body_bytes": 2**14, "max_file_bytes": 2**14, "max_audio_bytes": 2**14}
        _, state, client = serve(engine, max_bytes_in_flight=2**20, **limits)
        body = {"prompt": "a", "logprobs": 2, "max_tokens": 600}
        if path == "/v1/chat/completions":
            body = {**USER, "logprobs": True, "max_tokens": 1600}
        if path == "/v1/responses":
            body = {"input": "a", "include": ["message.output_text.logprobs"]}
        async with client:
            alone = await client.post(path, json=body)
            assert alone.status_code == 200, alone.text[:300]
            many = await asyncio.gather(*(client.post(path, json=body) for _ in range(8)))
            assert {one.status_code for one in many} <= {200, 503}
            overloaded = [one.text for one in many if one.status_code == 503]
            assert overloaded and all("max_bytes_in_flight" in text for text in overloaded)
        assert state.budget.used == 0
        assert not state.budget.by_client

    asyncio.run(work())


@pytest.mark.nightly
def test_long_answers_are_written_by_a_thread_in_short_pieces(monkeypatch):
    calls = []

    def recorded(value):
        text = encode_json(value)
        calls.append((threading.current_thread().name, len(text)))
        return text

    monkeypatch.setattr(json_parts, "encode_json", recorded)

    async def work():
        engine = ScriptedEngine(lambda prompt, _: "é" * 100, max_model_len=2**13)
        _, _, client = serve(engine)
        async with client:
            for path, body in (
                ("/v1/completions", {"prompt": "a" * 4000, "prompt_logprobs": 20}),
                ("/v1/completions", {"prompt": "a" * 2000, "echo": True, "logprobs": 20, "n": 2}),
                ("/v1/chat/completions", {**USER, "logprobs": True, "top_logprobs": 20, "n": 8}),
                ("/v1/embeddings", {"input": ["a"] * 2048}),
                ("/v1/rerank", {"query": "a", "documents": ["a" * 200] * 500}),
            ):
                calls.clear()
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text[:200]
                threads = {name.rpartition("_")[0] for name, _ in calls}
                assert threads == {"ed-esurge-answer"}
                assert sum(length for _, length in calls) > 2**16
                assert max(length for _, length in calls) < 2**19
                plain = json.dumps(answer.json(), ensure_ascii=False, separators=(",", ":"))
                assert answer.content == plain.encode()
                assert int(answer.headers["content-length"]) == len(answer.content)

    asyncio.run(work())


def value_of(value):
    """Return a value whose pieces are lists and strings."""
    if isinstance(value, JsonItems):
        return [value_of(item) for item in value.create()]
    if isinstance(value, JsonText):
        return "".join(value.create())
    if isinstance(value, dict):
        return {key: value_of(item) for key, item in value.items()}
    return [value_of(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("size", [0, 2**30])
def test_pieces_of_json_equal_the_text_of_one_call(size):
    entry = {"a": [1.5, None, True], "é\n": {"b": "\u2028", "c": []}}
    for value in (
        {},
        [],
        {"a": {}, "b": []},
        entry,
        [entry] * 300,
        list(range(1000)),
        [[1, 2], {"a": [entry]}],
        {"x": JsonItems(lambda: iter([])), "y": JsonText(list)},
        {"x": JsonItems(lambda: (entry for _ in range(300)))},
        [JsonItems(lambda: (JsonItems(lambda: range(5), 2) for _ in range(3)), 0), "z"],
        {"x": JsonText(lambda: ["ab", "", "c"]), "y": -1e-9},
    ):
        text = b"".join(asyncio.run(write_json(value, size)))
        assert text.decode() == encode_json(value_of(value))
    with pytest.raises(ValueError, match="JSON"):
        asyncio.run(write_json({"a": float("nan")}, size))


@pytest.mark.parametrize("shape", [(1,), (7000,), (3, 7000), (9, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_base64_in_pieces_equals_base64_of_all_numbers(shape, dtype):
    numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    fields = EncodingFields(encoding_format="base64", embed_dtype=dtype, endianness="big")
    whole = base64.b64encode(numbers.astype({"float32": ">f4", "float16": ">f2"}[dtype]).tobytes())
    assert "".join(fields.encode_vectors(numbers).create()) == whole.decode()


def test_limit_of_answers_beyond_the_bytes_in_flight_is_rejected():
    assert ServerLimits().answer_bytes == ServerLimits().max_bytes_in_flight // 2
    with pytest.raises(ValueError, match="max_answer_bytes"):
        ServerLimits(max_answer_bytes=2**40)
