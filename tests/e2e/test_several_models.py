"""One server with a chat model, an embedding model and a Whisper model."""

from __future__ import annotations

import io
import json
import socket
import time
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from ed_data.tokens.speech_tokenizers import train_whisper
from ed_elarge.building.media import set_generation, speech_config_fields
from ed_esurge import eSurge
from ed_esurge.server.launch import background
from ed_esurge.speech.engine import SpeechEngine
from ed_esurge.testing import byte_tokenizer
from ed_infra import registry
from ed_infra.testing import tiny_llama
from ed_models.speech import Transcriber
from ed_models.speech.whisper import Thresholds

pytestmark = pytest.mark.nightly  # three engines start

ONE: dict[str, Any] = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
RATE = 16000
TEXTS = ["The cat sleeps", "a stone", "x" * 30]
CHAT = [{"role": "user", "content": "Who sleeps?"}]


def wav(seconds: float) -> bytes:
    """Return a WAV file of a rising tone."""
    t = np.arange(int(seconds * RATE)) / RATE
    samples = 0.4 * np.sin(2 * np.pi * (200 + 150 * t) * t)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(np.round(samples * 2**15).astype("<i2").tobytes())
    return file.getvalue()


def whisper() -> Transcriber:
    processor = train_whisper(["who sleeps"], 280, mel_bins=20, positions=50)
    config = registry.get_config("whisper")(
        vocab_size=len(processor.tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=20,
        max_source_positions=50,
        max_target_positions=32,
        init_std=0.3,
        **speech_config_fields(processor.tokenizer),
        **ONE,
    )
    task = "speech-sequence-to-sequence"
    model = registry.get_module(task, "whisper").create(config, seed=3)
    set_generation(model, processor.tokenizer)
    # Random weights are never confident, so every attempt would fail the usual thresholds.
    never = Thresholds(None, -100.0, 0.999)
    return Transcriber(model, processor, thresholds=never)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    llama = tiny_llama(vocab_size=260, num_hidden_layers=2, initializer_range=0.2)
    llama = {**llama, **ONE}
    kind = llama.pop("model_type")
    bert: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    config = registry.get_config
    return {
        "chat": registry.get_module("causal-language-model", kind).create(
            config(kind)(**llama), seed=1
        ),
        "embedder": registry.get_module("embedding", "bert").create(
            config("bert")(**bert, **ONE), seed=2
        ),
        "whisper": whisper(),
    }


@pytest.fixture(scope="module")
def root(models: dict[str, Any]) -> Iterator[str]:
    options: dict[str, Any] = {"compile_runner": False, "silent_mode": True, "max_num_seqs": 4}
    engines: dict[str, Any] = {
        "chat": eSurge(models["chat"], byte_tokenizer(), max_model_len=128, page_size=8, **options),
        "embedder": eSurge(models["embedder"], byte_tokenizer(), **options),
        "whisper": SpeechEngine(models["whisper"], "whisper"),
    }
    with background(engines) as url:
        yield url.removesuffix("/v1")


def post(root: str, path: str, body: dict[str, Any]) -> httpx.Response:
    if "file" in body:
        form = {name: value for name, value in body.items() if name != "file"}
        return httpx.post(f"{root}{path}", data=form, files={"file": body["file"]}, timeout=60)
    return httpx.post(f"{root}{path}", json=body, timeout=60)


GREEDY = {"temperature": 0, "max_tokens": 8}
SPEECH = {"file": wav(1.7), "response_format": "verbose_json"}
#: Path -> body without the model, and the models that serve the path.
REQUESTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/completions": ({"prompt": "The cat", **GREEDY}, ("chat",)),
    "/v1/chat/completions": ({"messages": CHAT, **GREEDY}, ("chat",)),
    "/v1/responses": ({"input": "Hello", "temperature": 0, "max_output_tokens": 8}, ("chat",)),
    "/v1/messages": ({"messages": CHAT, **GREEDY}, ("chat",)),
    "/v1/embeddings": ({"input": TEXTS}, ("chat", "embedder")),
    "/pooling": ({"input": TEXTS, "task": "token_embed"}, ("embedder",)),
    "/score": ({"text_1": TEXTS[0], "text_2": TEXTS}, ("chat", "embedder")),
    "/rerank": ({"query": TEXTS[0], "documents": TEXTS}, ("chat", "embedder")),
    "/classify": ({"input": TEXTS}, ()),
    "/v1/audio/transcriptions": (SPEECH, ("whisper",)),
    "/v1/audio/translations": (SPEECH, ("whisper",)),
}
SERVED = [(path, model) for path, (_, able) in REQUESTS.items() for model in able]
#: Fields of an answer that differ between equal requests.
CHANGING = {
    *("id", "created", "created_at", "completed_at", "system_fingerprint"),
    # The second request reads the prompt from the prefix cache.
    *("cached_tokens", "cache_read_input_tokens", "input_tokens"),
}


def without_names(value: Any) -> Any:
    """Return an answer without the fields that differ between equal requests."""
    if isinstance(value, dict):
        return {name: without_names(x) for name, x in value.items() if name not in CHANGING}
    return [without_names(x) for x in value] if isinstance(value, list) else value


def answers_of(root: str, path: str, model: str) -> Any:
    answer = post(root, path, {"model": model, **REQUESTS[path][0]})
    assert answer.status_code == 200, (path, model, answer.text)
    return without_names(answer.json())


def numbers_close(found: Any, expected: Any) -> None:
    """Assert that answers are equal, up to the rounding of batches of other sizes."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for name in found:
            numbers_close(found[name], expected[name])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            numbers_close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, abs=2e-5)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def quiet(root: str) -> dict[tuple[str, str], Any]:
    """The answers of a server without other requests."""
    return {case: answers_of(root, *case) for case in SERVED}


def test_models_endpoint_lists_every_model(root: str) -> None:
    cards = httpx.get(f"{root}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["chat", "embedder", "whisper"]
    for name in ("chat", "embedder", "whisper"):
        assert httpx.get(f"{root}/v1/models/{name}").json()["id"] == name


def test_each_answer_comes_from_the_named_model(
    models: dict[str, Any], quiet: dict[tuple[str, str], Any]
) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("The cat")["input_ids"]
    generated = models["chat"].generate(np.array([ids]), max_new_tokens=8).sequences[0, len(ids) :]
    (choice,) = quiet["/v1/completions", "chat"]["choices"]
    text = tokenizer.decode(generated, skip_special_tokens=True)
    assert text.startswith(choice["text"]) and choice["text"]

    def vector(text: str) -> np.ndarray:
        tokens = np.array([tokenizer(text)["input_ids"]])
        found = np.asarray(models["embedder"](tokens).embeddings[0])
        return found / np.linalg.norm(found)

    found = [item["embedding"] for item in quiet["/v1/embeddings", "embedder"]["data"]]
    np.testing.assert_allclose(found, [vector(text) for text in TEXTS], atol=2e-5)
    assert len(quiet["/v1/embeddings", "chat"]["data"][0]["embedding"]) != 0
    samples = np.frombuffer(SPEECH["file"][44:], "<i2").astype(np.float32) / 2**15
    transcript = models["whisper"].transcribe(samples, timestamps=True)
    answer = quiet["/v1/audio/transcriptions", "whisper"]
    assert [s["tokens"] for s in answer["segments"]] == [
        list(s.tokens) for s in transcript.segments
    ]
    assert answer["text"] == transcript.text and answer["task"] == "transcribe"
    assert quiet["/v1/audio/translations", "whisper"]["task"] == "translate"
    for (path, model), answer in quiet.items():
        if "audio" not in path:
            assert answer["model"] == model


@pytest.mark.parametrize("path", REQUESTS)
def test_refusal_names_the_models_that_serve_the_endpoint(root: str, path: str) -> None:
    body, able = REQUESTS[path]
    for model in {"chat", "embedder", "whisper"} - set(able):
        answer = post(root, path, {"model": model, **body})
        assert answer.status_code == 400, (model, answer.text)
        error = answer.json()["error"]
        message = error["message"]
        assert f"{model!r} has the task" in message
        choices = message.rpartition(";")[2]
        for other in able:
            assert repr(other) in choices
        assert able or "no model of this server classifies texts" in message
        assert repr(model) not in choices
        if path != "/v1/messages":
            assert (error["param"], error["code"]) == ("model", "unsupported_task")


def test_requests_to_all_models_at_the_same_time_have_equal_answers(
    root: str, quiet: dict[tuple[str, str], Any]
) -> None:
    with ThreadPoolExecutor(12) as threads:
        jobs = [(case, threads.submit(answers_of, root, *case)) for case in SERVED * 3]
    for case, job in jobs:
        numbers_close(job.result(), quiet[case])


def _left(root: str, path: str, body: dict[str, Any]) -> None:
    """Send a request and close the connection before the answer."""
    request = httpx.Request("POST", f"{root}{path}", **body)
    head = f"POST {path} HTTP/1.1\r\nHost: {request.url.netloc.decode()}\r\n"
    for name in ("content-type", "content-length"):
        head += f"{name}: {request.headers[name]}\r\n"
    with socket.create_connection((request.url.host, request.url.port)) as connection:
        connection.sendall(head.encode() + b"\r\n" + request.read())
        time.sleep(0.05)


DISTURBANCES: dict[str, Callable[[str], object]] = {
    "a chat whose client leaves": lambda root: _left(
        root,
        "/v1/chat/completions",
        {"json": {"model": "chat", "messages": CHAT, "stream": True, "ignore_eos": True}},
    ),
    "embeddings whose client leaves": lambda root: _left(
        root, "/v1/embeddings", {"json": {"model": "embedder", "input": TEXTS * 30}}
    ),
    "a transcription whose client leaves": lambda root: _left(
        root,
        "/v1/audio/transcriptions",
        {"data": {"model": "whisper"}, "files": {"file": wav(20)}},
    ),
    "a long prompt": lambda root: post(
        root, "/v1/completions", {"model": "chat", "prompt": "a" * 500}
    ).raise_for_status(),
    "a long text": lambda root: post(
        root, "/v1/embeddings", {"model": "embedder", "input": "a" * 500}
    ).raise_for_status(),
    "no audio": lambda root: post(
        root, "/v1/audio/transcriptions", {"model": "whisper", "file": b"RIFF" + bytes(99)}
    ).raise_for_status(),
    "a wrong model": lambda root: post(
        root, "/v1/embeddings", {"model": "whisper", "input": "a"}
    ).raise_for_status(),
    "no JSON": lambda root: httpx.post(f"{root}/v1/completions", content=b"{").raise_for_status(),
}


def test_disconnects_and_bad_requests_do_not_disturb_other_models(
    root: str, quiet: dict[tuple[str, str], Any]
) -> None:
    def disturb(name: str) -> None:
        if "leaves" in name:
            DISTURBANCES[name](root)
            return
        with pytest.raises(httpx.HTTPStatusError, match="'400 "):
            DISTURBANCES[name](root)

    with ThreadPoolExecutor(12) as threads:
        troubles = [threads.submit(disturb, name) for name in [*DISTURBANCES] * 3]
        jobs = [(case, threads.submit(answers_of, root, *case)) for case in SERVED]
    for case, job in jobs:
        numbers_close(job.result(), quiet[case])
    for trouble in troubles:
        trouble.result()
    deadline = time.monotonic() + 30
    while httpx.get(f"{root}/load").json()["server_load"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert httpx.get(f"{root}/load").json() == {"server_load": 0}
    health = httpx.get(f"{root}/health")
    assert health.status_code == 200, json.dumps(health.json())
