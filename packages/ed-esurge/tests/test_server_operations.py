"""Keys, CORS, metrics, aborted requests and draining."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.server import create_app, read_keys
from ed_esurge.server.http import auth
from ed_esurge.server.launch import background, serve
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_server_accepts_configured_api_keys_only():
    with background(ScriptedEngine(), api_key=["first", "second"]) as url:
        for key in ("first", "second"):
            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            assert client.models.list().data
        wrong = openai.OpenAI(base_url=url, api_key="third", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as caught:
            wrong.models.list()
        assert caught.value.code == "invalid_api_key"
        root = url.removesuffix("/v1")
        assert httpx.post(f"{root}/tokenize", json={"prompt": "a"}).status_code == 401
        assert httpx.get(f"{root}/v1/models", headers={"Authorization": "first"}).status_code == 401
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version"):
            assert httpx.get(root + path).status_code == 200


def test_api_keys_enforce_limits_and_expiry(tmp_path, monkeypatch):
    def digest(key):
        return hashlib.sha256(key.encode()).hexdigest()

    file = tmp_path / "keys.json"
    entries = [
        {"sha256": digest("few"), "name": "Ann", "requests_per_minute": 2},
        {"sha256": digest("one"), "max_concurrent_requests": 1},
        {"sha256": digest("old"), "expires": "2020-01-01T00:00:00Z"},
        {"sha256": digest("new"), "expires": "2999-01-01T00:00:00+02:00"},
    ]
    file.write_text(json.dumps(entries))
    engine = ScriptedEngine(delay=0.1)
    with background(engine, api_key=[*read_keys(file), "plain"]) as url:

        def post(key, name="Authorization", **body):
            value = f"Bearer {key}" if name == "Authorization" else key
            body = {"prompt": "a", "max_tokens": 1, **body}
            return httpx.post(f"{url}/completions", json=body, headers={name: value})

        assert [post("few").status_code for _ in range(3)] == [200, 200, 429]
        refused = post("few")
        assert refused.headers["retry-after"]
        assert "2 requests a minute" in refused.json()["error"]["message"]
        models = httpx.get(f"{url}/models", headers={"Authorization": "Bearer few"})
        assert models.status_code == 200  # GET requests are not counted
        expired = post("old").json()["error"]
        assert (expired["code"], "2020" in expired["message"]) == ("invalid_api_key", True)
        assert post("new").status_code == post("plain").status_code == 200
        assert post("plain", "x-api-key").status_code == 200  # the header of Anthropic's clients
        with httpx.stream(
            "POST",
            f"{url}/completions",
            json={"prompt": "a", "max_tokens": 20, "stream": True},
            headers={"Authorization": "Bearer one"},
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert post("one").status_code == 429
            assert post("new").status_code == 200
        wait_for(lambda: post("one").status_code == 200)
        clock = time.monotonic
        monkeypatch.setattr(auth.time, "monotonic", lambda: clock() + 61)
        assert post("few").status_code == 200


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[", "JSON list"),
        ("[]", "at least 1"),
        ('[{"sha256": "secret"}]', "0.sha256"),
        ('[{"key": "secret"}]', "key"),
        ('[{"sha256": "%s", "expires": "2020-01-01T00:00:00"}]' % ("0" * 64), "timezone"),
    ],
)
def test_invalid_key_files_raise_config_error(tmp_path, text, fragment):
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=fragment) as error:
        read_keys(file)
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none.json")


def test_cors_headers_are_sent_only_for_configured_origins():
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    with background(ScriptedEngine(), cors_origins=["http://page.example"], api_key="k") as url:
        answer = httpx.options(f"{url}/chat/completions", headers=ask)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        # A page can also read the reason of an error.
        refused = httpx.get(f"{url}/models", headers=ask)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
    with background(ScriptedEngine()) as url:
        answer = httpx.get(f"{url}/models", headers=ask)
        assert "access-control-allow-origin" not in answer.headers


def metrics(url):
    lines = httpx.get(url.replace("/v1", "/metrics")).text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_metrics_have_vllm_names_and_exact_counts():
    with background(ScriptedEngine(lambda prompt, choice: "abc"), served_model_name="m") as url:
        before = metrics(url)
        client = openai.OpenAI(base_url=url, api_key="none")
        client.completions.create(model="m", prompt=["xy", "z"], n=2)
        list(client.completions.create(model="m", prompt="z", max_tokens=2, stream=True))
        after = metrics(url)

    def grew(name, **labels):
        text = ",".join(f'{key}="{value}"' for key, value in {**labels, "model_name": "m"}.items())
        key = f"{name}{{{text}}}"
        return float(after[key]) - float(before.get(key, 0))

    assert grew("vllm:prompt_tokens_total") == 3 + 2 + 2
    assert grew("vllm:generation_tokens_total") == 4 * 4 + 2
    assert grew("vllm:request_success_total", finished_reason="stop") == 4
    assert grew("vllm:request_success_total", finished_reason="length") == 1
    assert grew("vllm:request_success_total", finished_reason="abort") == 0
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    ):
        assert grew(f"{name}_count") == 3
    assert grew("vllm:inter_token_latency_seconds_count") == 7 + 7 + 1
    assert grew("vllm:request_params_n_sum") == 2 + 2 + 1
    assert grew("vllm:request_params_max_tokens_sum") == 16 + 16 + 2
    assert grew("vllm:request_params_n_count") == grew("vllm:request_params_max_tokens_count") == 3
    assert grew("vllm:num_requests_running", engine="0") == 0
    key = 'http_requests_total{handler="/v1/completions",method="POST",status="200"}'
    assert float(after[key]) == 2


def test_times_of_requests_follow_their_definitions():
    """With two completions, a token takes the time of one step, not half of the time."""
    with background(ScriptedEngine(lambda prompt, choice: "abcdefgh", delay=0.02)) as url:
        client = openai.OpenAI(base_url=url, api_key="none")
        client.completions.create(model="scripted", prompt="a", n=2)
        known = metrics(url)

    def total(name):
        return float(known[f'vllm:{name}_seconds_sum{{model_name="scripted"}}'])

    phases = total("request_prefill_time") + total("request_decode_time")
    assert total("request_inference_time") == pytest.approx(phases)
    assert total("request_time_per_output_token") == pytest.approx(
        total("request_decode_time") / len("abcdefgh")
    )


def test_adapters_of_unfinished_requests_are_listed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    config = EngineConfig(max_loras=3, page_size=32)
    engine = ScriptedEngine(lambda prompt, choice: "a" * 500, delay=0.01, config=config)

    def listed(url):
        (line,) = [key for key in metrics(url) if key.startswith("vllm:lora_requests_info")]
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    with background(engine, lora_directory=tmp_path) as url:
        body = {"lora_name": "mine", "lora_path": "mine"}
        assert httpx.post(f"{url}/load_lora_adapter", json=body).status_code == 200
        assert (listed(url)["max_lora"], listed(url)["running_lora_adapters"]) == ("3", "")
        client = openai.OpenAI(base_url=url, api_key="none")
        options = {"model": "mine", "prompt": "a", "max_tokens": 400, "stream": True}
        with client.completions.create(**options) as stream:
            next(iter(stream))
            assert listed(url)["running_lora_adapters"] == "mine"
        wait_for(lambda: listed(url)["running_lora_adapters"] == "")
        (pages,) = [key for key in metrics(url) if key.startswith("vllm:cache_config_info")]
        assert 'block_size="32"' in pages


def test_metrics_of_the_process_are_those_of_the_kernel():
    with background(ScriptedEngine()) as url:
        known = metrics(url)
    resident = float(known["process_resident_memory_bytes"])
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    assert resident == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.2)
    assert float(known["process_cpu_seconds_total"]) <= sum(os.times()[:2]) + 0.05
    assert 0 < float(known["process_open_fds"]) <= float(known["process_max_fds"])


def test_two_servers_in_one_process_have_separate_metrics():
    with background(ScriptedEngine()) as first, background(ScriptedEngine()) as second:
        httpx.post(f"{first}/completions", json={"prompt": "a"})
        assert float(metrics(first)['vllm:prompt_tokens_total{model_name="scripted"}']) == 2
        assert float(metrics(second)['vllm:prompt_tokens_total{model_name="scripted"}']) == 0


def test_metrics_report_pages_in_host_memory(monkeypatch):
    numbers = {
        "external_prefix_cache_queries": 9,
        "external_prefix_cache_hits": 8,
        "kv_offload_store_bytes": 7,
        "kv_offload_load_bytes": 6,
        "kv_offload_cpu_cache_usage": 0.5,
    }
    names = dict.fromkeys(numbers, "_total") | {"kv_offload_cpu_cache_usage": "_perc"}
    with background(ScriptedEngine()) as url:
        assert not any("kv_offload" in key for key in metrics(url))
    monkeypatch.setattr(ScriptedEngine, "stats", lambda self: numbers)
    with background(ScriptedEngine()) as url:
        shown = {key.partition("{")[0]: float(value) for key, value in metrics(url).items()}
    assert {name: shown[f"vllm:{name}{end}"] for name, end in names.items()} == numbers


def test_clients_cannot_create_metric_labels():
    with background(ScriptedEngine()) as url:
        for place in range(3):
            httpx.get(url.replace("/v1", f"/nowhere/{place}"))
        assert not [key for key in metrics(url) if "nowhere" in key]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_disconnected_client_aborts_its_requests(stream, prompt):
    engine = ScriptedEngine(lambda prompt, choice: "x" * 200, delay=0.05)
    with background(engine) as url:
        body = {"prompt": prompt, "max_tokens": 200, "stream": stream}

        async def leave():
            async with httpx.AsyncClient() as client:
                answer = asyncio.create_task(client.post(f"{url}/completions", json=body))
                while len(engine.requests) < len(prompt):
                    await asyncio.sleep(0.01)
                answer.cancel()

        if stream:
            with httpx.stream("POST", f"{url}/completions", json=body) as answer:
                next(answer.iter_lines())
                wait_for(lambda: len(engine.requests) == len(prompt))
        else:
            asyncio.run(leave())
        wait_for(lambda: set(engine.aborted) == set(engine.requests))
        assert len(engine.aborted) == len(prompt)
        wait_for(lambda: engine.stats()["num_requests_running"] == 0)
        key = 'vllm:request_success_total{finished_reason="abort",model_name="scripted"}'
        assert float(metrics(url)[key]) == len(prompt)


def test_concurrent_streams_return_their_own_tokens():
    engine = ScriptedEngine(lambda prompt, choice: f"{len(prompt)}é" * 20, delay=0.001)

    async def one(client, length):
        stream = await client.completions.create(
            model="scripted", prompt="a" * length, max_tokens=200, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone(url):
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(one(client, length) for length in range(1, 17)))

    with background(engine) as url:
        assert asyncio.run(everyone(url)) == [f"{length + 1}é" * 20 for length in range(1, 17)]


def test_occupied_port_raises_config_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            serve(ScriptedEngine(), port=taken.getsockname()[1])


def test_engine_without_tokenizer_raises_config_error():
    engine = ScriptedEngine()
    engine.tokenizer = None
    with pytest.raises(ConfigError, match="tokenizer"):
        create_app(engine)


SERVER = """
from ed_esurge.server import serve
from ed_esurge.testing import ScriptedEngine
serve(ScriptedEngine(lambda prompt, choice: "x" * 60, delay=0.02), port=0, drain_seconds=10)
print("stopped", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_running_requests_finish_after_a_signal(name):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving at http://127.0.0.1:")
        url = line.split()[2]
        chunks = []

        def read():
            body = {"prompt": "a", "max_tokens": 60, "stream": True}
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=20) as answer:
                chunks.extend(text for text in answer.iter_lines() if text)

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: len(chunks) > 2)
        process.send_signal(getattr(signal, name))
        reader.join(60)
        assert chunks[-1] == "data: [DONE]"
        texts = [json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks[:-1]]
        assert "".join(texts) == "x" * 60
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/models")
        assert process.wait(60) == 0
        assert process.stdout.read() == "stopped\n"
    finally:
        process.kill()
