"""Hostile and invalid requests return specific errors and do not delay other clients."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ed_esurge.config import EngineConfig, ServerLimits
from ed_esurge.server.generation import answers, prompts
from ed_esurge.server.http import body
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine

JSON = {"Content-Type": "application/json"}
BIASES, LONG = dict.fromkeys(map(str, range(60_000)), 1), "a" * 200_000
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def http():
    limits = {"max_body_bytes": 2**20, "body_timeout": 1.0}
    with background(ScriptedEngine(), limits=limits) as url, httpx.Client(base_url=url) as client:
        yield client


def refused(response, status=400):
    assert response.status_code == status, response.text
    return answers.Error.model_validate(response.json()).error


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": ' + nested(100_000) + b"}", 400),
        (b'{"prompt": [' + b"9" * 10_000 + b"]}", 400),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b"[1]", 400),
        (b"", 400),
        (b'{"prompt": "' + b"a" * 2**20 + b'"}', 413),
    ],
    ids=["utf-8", "deep", "huge id", "huge number", "nan", "inf", "list", "empty", "long"],
)
def test_bodies_that_are_not_requests_return_400(http, body, status):
    refused(http.post("completions", content=body, headers=JSON), status)

    def parts():  # no Content-Length
        yield from (body[at : at + 65536] for at in range(0, len(body), 65536))

    refused(http.post("completions", content=parts(), headers=JSON), status)


def test_compressed_bodies_and_forms_are_rejected(http):
    body = gzip.compress(json.dumps({"prompt": "a"}).encode())
    answer = http.post("completions", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    refused(answer, 415)
    answer = http.post(
        "completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}
    )
    assert "Content-Type" in refused(answer).message


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("completions", {"prompt": ["a"] * 20_000}, "prompt"),
        ("completions", {"prompt": "a", "logit_bias": BIASES}, "logit_bias"),
        ("completions", {"prompt": "a", "stop": ["a"] * 1000}, "stop"),
        ("completions", {"prompt": "a", "stop_token_ids": ["x"] * 100_000}, "stop_token_ids"),
        ("completions", {"prompt": ["a"] * 100, "n": 100}, "n"),
        ("completions", {"prompt": "a", "top_k": 2**31}, "top_k"),
        ("completions", {"prompt": "a", "repetition_penalty": 1e-46}, "repetition_penalty"),
        ("completions", {"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids"),
        ("completions", {"prompt": "a", "logit_bias": {"\u00b2": 1}}, "logit_bias"),
        ("completions", {"prompt": LONG}, "prompt"),
        ("chat/completions", {"messages": CHAT["messages"] * 20_000}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_oversized_fields_are_rejected_before_tokenization(http, monkeypatch, url, body, param):
    kind = type(ScriptedEngine().tokenizer)
    tokenize = kind.__call__

    def short(self, text, **options):
        assert len(text) < 100, "it is tokenized before it is refused"
        return tokenize(self, text, **options)

    monkeypatch.setattr(kind, "__call__", short)
    error = refused(http.post(url, json=body))
    assert error.param == param


def test_deeply_nested_template_variables_return_an_error(http):
    deep = json.loads(nested(150))
    answer = http.post("chat/completions", json={**CHAT, "chat_template_kwargs": {"x": deep}})
    assert answer.status_code == 200
    body = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": '
    body += nested(5000) + b"}}"
    refused(http.post("chat/completions", content=body, headers=JSON))


def test_special_tokens_in_a_message_are_encoded_as_text(http):
    def count(content):
        body = {"messages": [{"role": "user", "content": content}]}
        return http.post("/../tokenize", json=body).json()["tokens"]

    eos = ScriptedEngine().tokenizer.eos_token_id
    assert eos not in count("</s>")
    assert len(count("</s>")) == len(count("abcd"))


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connect(http):
    url = http.base_url
    return socket.create_connection((url.host, url.port), timeout=30)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "sent"), [(True, b""), (True, HALF), (False, HALF)], ids=["none", "half", "second"]
)
def test_server_closes_connection_without_complete_request_head(http, first, sent):
    with connect(http) as client:
        if not first:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096)
        client.sendall(sent)
        while client.recv(4096):  # until it is closed
            pass


def test_incomplete_request_body_returns_408(http):
    with connect(http) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


def test_foreign_host_headers_return_421(http):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        answer = http.get("models", headers={"Host": host})
        assert refused(answer, 421).code == "host_not_allowed"
    for host in ("localhost", "127.0.0.1:1", "[::1]:8", "LOCALHOST"):
        assert http.get("models", headers={"Host": host}).status_code == 200
    with background(ScriptedEngine(), allowed_hosts=["llm.example"]) as url:
        assert httpx.get(f"{url}/models", headers={"Host": "llm.example"}).status_code == 200
        refused(httpx.get(f"{url}/models"), 421)


@pytest.mark.nightly
def test_requests_above_the_concurrency_limit_return_429():
    engine = ScriptedEngine(lambda prompt, choice: "x" * 99, delay=0.02)
    with background(engine, limits=ServerLimits(max_concurrent_requests=1)) as url:
        body = {"prompt": "a", "max_tokens": 99, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            answer = httpx.post(f"{url}/completions", json={"prompt": "a"})
            assert refused(answer, 429).code == "rate_limit_exceeded"
            assert answer.headers["retry-after"]
            assert httpx.get(f"{url}/models").status_code == 200
            assert list(lines)[-2] == "data: [DONE]"
        assert httpx.post(f"{url}/completions", json={"prompt": "a"}).status_code == 200


def test_server_rejects_connections_above_limit():
    with background(ScriptedEngine(), limits=ServerLimits(max_connections=2)) as url:
        port = int(url.split(":")[2].split("/")[0])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        time.sleep(0.2)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/models")
        for client in held:
            client.close()
        time.sleep(0.2)
        assert httpx.get(f"{url}/models").status_code == 200


def test_request_timeout_aborts_slow_answers():
    engine = ScriptedEngine(lambda prompt, choice: "x" * 99, delay=0.05)
    with background(engine, limits={"request_timeout": 0.3}) as url:
        refused(httpx.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 99}), 408)
        body = {"prompt": "a", "max_tokens": 99, "stream": True}
        lines = httpx.post(f"{url}/completions", json=body).text.split("\n\n")
        assert '"code":"request_timeout"' in lines[-3]
        assert lines[-2] == "data: [DONE]"
        assert len(engine.aborted) == 2


@pytest.mark.parametrize("work", ["parsing", "tokenizing", "templating", "detokenizing"])
def test_expensive_requests_do_not_delay_other_requests(monkeypatch, work):
    """A small request is answered while a large request is parsed or tokenized."""
    begun, go_on = threading.Event(), threading.Event()

    def held(function):
        def waits(*args, **options):
            begun.set()
            assert go_on.wait(60), "the small request was not answered meanwhile"
            return function(*args, **options)

        return waits

    engine = ScriptedEngine(max_model_len=2**20)
    kind = type(engine.tokenizer)
    places = {
        "parsing": (body, "_parse_body"),
        "tokenizing": (kind, "__call__"),
        "templating": (ChatTemplate, "render"),
        "detokenizing": (prompts, "decode_tokens"),
    }
    text = "word " * 50_000
    path, large = {
        "templating": ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "detokenizing": ("../detokenize", {"tokens": [65] * 100_000}),
    }.get(work, ("completions", {"prompt": ["word " * 300] * 100}))
    with background(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.get("models")
        where, name = places[work]
        monkeypatch.setattr(where, name, held(getattr(where, name)))
        with ThreadPoolExecutor() as pool:
            large |= {"max_tokens": 1} if "tokens" not in large else {}
            asked = pool.submit(httpx.post, f"{url}/{path}", json=large, timeout=60)
            try:
                assert begun.wait(60)
                assert client.get("models", timeout=30).status_code == 200
                assert not asked.done()
            finally:
                go_on.set()
            assert asked.result().status_code == 200


@pytest.mark.nightly
def test_truncation_options_limit_the_prompt():
    prompt = "abc" * 100
    for config, status, kept in [
        (EngineConfig(auto_truncate_prompt=True), 200, 255),
        (EngineConfig(auto_truncate_prompt=True, reserve_tokens=56), 200, 200),
        (EngineConfig(), 400, 0),
        (EngineConfig(strict_context=True), 400, 0),
    ]:
        engine = ScriptedEngine(lambda prompt, choice: "x" * 300, config=config)
        with background(engine) as url:
            answer = httpx.post(f"{url}/completions", json={"prompt": prompt})
            assert answer.status_code == status
            if kept:
                usage, cut = answer.json()["usage"], 301 - kept
                assert usage["prompt_tokens"] == kept
                assert usage["prompt_tokens_details"]["truncated_tokens"] == cut
                assert answer.headers["x-truncated-prompt-tokens"] == str(cut)
            cap = httpx.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 999})
            assert cap.status_code == (400 if config.strict_context else 200)
    for mode, ends in [("left", "bc"), ("right", "ab"), ("middle", "bc")]:
        config = EngineConfig(auto_truncate_prompt=True, truncate_mode=mode)
        engine = ScriptedEngine(config=config)
        with background(engine) as url:
            body = {"prompt": "<" + prompt + "bc", "echo": True}
            text = httpx.post(f"{url}/completions", json=body).json()["choices"][0]["text"]
            assert text.startswith("<") == (mode != "left") or text.startswith("<s>")
            assert ends in text


def test_engine_failure_returns_error_message():
    class Failing(ScriptedEngine):
        async def generate(self, *args, **options):
            async for delta in super().generate(*args, **options):
                delta.outputs[0].finish_reason = "error"
                delta.error = "the engine failed on this request: NaN"
                yield delta

    with background(Failing()) as url:
        error = refused(httpx.post(f"{url}/completions", json={"prompt": "a"}), 500)
        assert error.message.endswith("NaN")
        assert httpx.get(url.replace("/v1", "/health")).status_code == 200


SERVER = """
from ed_esurge.server import serve
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine
serve(ScriptedEngine(lambda prompt, choice: "x" * 200, delay=0.1), port=0, drain_seconds=1)
print("stopped", flush=True)
"""


@pytest.mark.nightly
def test_requests_after_drain_timeout_receive_server_stopping():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        url = process.stdout.readline().split()[2]
        got = {}

        def ask(stream):
            body = {"prompt": "a", "max_tokens": 200, "stream": stream}
            got[stream] = httpx.post(f"{url}/completions", json=body, timeout=20)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert refused(got[False], 503).code == "server_stopping"
        lines = got[True].text.split("\n\n")
        assert '"code":"server_stopping"' in lines[-3]
        assert lines[-2] == "data: [DONE]"
        assert process.wait(60) == 0
        assert process.stdout.read() == "stopped\n"
    finally:
        process.kill()
