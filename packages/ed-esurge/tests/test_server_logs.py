"""The log of a server: times, requests without probes, and a line about its throughput."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import httpx
import jax.numpy as jnp
import pytest
from ed_esurge.command import serve as serve_command
from ed_esurge.command.main import main
from ed_esurge.engine.facts import describe_dtypes
from ed_esurge.server import launch
from ed_esurge.server.launch import background
from ed_esurge.server.metrics import ServerMetrics
from ed_esurge.server.operations import throughput
from ed_esurge.server.operations.throughput import ProbeFilter, Throughput
from ed_esurge.testing import ScriptedEngine
from ed_infra.specs import QUANTIZATION_FORMATS, EasyDeLQuantizationConfig
from ed_layers.quantization.encoding import encode_matrix
from flax import nnx


def test_log_has_times_and_no_probes(capfd: pytest.CaptureFixture[str]) -> None:
    with background(ScriptedEngine(), log_level="info") as url:
        root = url.removesuffix("/v1")
        for path in ("/health", "/health/ready?x=1", "/metrics", "/v1/models", "/nowhere"):
            httpx.get(root + path)
    lines = [line for line in capfd.readouterr().out.splitlines() if '"GET' in line]
    assert [re.search(r'"GET (\S+)', line)[1] for line in lines] == ["/v1/models", "/nowhere"]  # type: ignore[index]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in lines)


@pytest.mark.parametrize("flags", [(), ("--quiet",), ("--json",), ("--quiet", "--json")])
def test_serve_prints_its_result_when_it_accepts_requests(
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    levels = []

    def run(server: Any, sockets: object) -> None:
        levels.append(server.config.log_level)
        server.started = True
        server._on_ready()
        print("a line of the log")

    monkeypatch.setattr(serve_command, "create_engines", lambda *_: ScriptedEngine())
    monkeypatch.setattr(launch._Server, "run", run)
    assert main(["serve", "somewhere", "--port", "0", *flags]) == 0
    out, err = capsys.readouterr()
    url = r"http://127\.0\.0\.1:\d+/v1"
    if "--json" in flags:
        values = json.loads(out)
        assert re.fullmatch(url, values.pop("url"))
        assert values == {"models": ["scripted"]}
    else:
        assert re.match(rf"serving at {url} \(Ctrl-C stops\)\n", out)
    assert ("a line of the log" in out) is (not flags)
    assert ("a line of the log" in err) is (flags == ("--json",))
    assert levels == ["warning" if "--quiet" in flags else "info"]


def test_error_of_serve_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--json"]) == 2
    assert "name a MODEL" in json.loads(capsys.readouterr().out)["error"]


class Weights(nnx.Module):
    def __init__(self, kernel: object, dtype: str) -> None:
        self.kernel, self.scale = nnx.Param(kernel), nnx.Param(jnp.ones(8))
        self.dtype = jnp.dtype(dtype)


@pytest.mark.parametrize(
    ("weights", "computation", "expected"),
    [
        ("float32", "float32", "float32 weights"),
        ("bfloat16", "bfloat16", "bfloat16 weights"),
        ("bfloat16", "float32", "bfloat16 weights, float32 computation"),
        ("nf4", "float32", "nf4 weights, float32 computation"),
        ("w8a8", "bfloat16", "int8_a8 weights, bfloat16 computation"),
    ],
)
def test_banner_states_the_dtypes(weights: str, computation: str, expected: str) -> None:
    kernel = jnp.ones((64, 64))
    if weights in QUANTIZATION_FORMATS:
        value: object = encode_matrix(EasyDeLQuantizationConfig(dtype=weights), kernel)
    else:
        value = kernel.astype(weights)
    assert describe_dtypes(Weights(value, computation)) == expected


@pytest.mark.parametrize(("status", "is_shown"), [(200, False), (404, True), (503, True)])
def test_failed_probe_is_in_the_log(status: int, is_shown: bool) -> None:
    record = logging.LogRecord("", 20, "", 0, "", ("a", "GET", "/health", "1.1", status), None)
    assert ProbeFilter().filter(record) is is_shown


def test_record_of_another_form_is_in_the_log() -> None:
    assert ProbeFilter().filter(logging.LogRecord("", 20, "", 0, "text", None, None))


def busy_metrics(stats: dict[str, float]) -> ServerMetrics:
    metrics = ServerMetrics()
    metrics.of("m", lambda: [stats, stats])
    return metrics


def test_line_has_rates_since_the_previous_line() -> None:
    stats = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage": 0.25}
    metrics, times = busy_metrics(stats), iter([0.0, 10.0, 30.0, 40.0])
    described = Throughput(metrics, lambda: next(times))
    metrics.prompt_tokens.labels("m").inc(100)
    metrics.tokens["m"].generated += 50
    assert list(described.describe()) == [
        "m: 10.0 prompt tokens/s, 5.0 generated tokens/s, 0 running, 0 waiting, pages 25.0% used"
    ]
    stats |= {"num_requests_running": 2.0, "prefix_cache_queries": 8.0, "prefix_cache_hits": 2.0}
    metrics.tokens["m"].generated += 50
    assert list(described.describe()) == [
        "m: 0.0 prompt tokens/s, 2.5 generated tokens/s, 4 running, 0 waiting, pages 25.0% used, "
        "prefix cache hits 25.0%"
    ]
    stats["num_requests_running"] = 0.0
    assert list(described.describe()) == []  # idle


def test_server_logs_its_throughput(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(throughput, "INTERVAL", 0.01)
    metrics = busy_metrics({"num_requests_running": 1.0})

    async def watch() -> None:
        task = asyncio.create_task(throughput.log_throughput(metrics))
        while not caplog.records:
            await asyncio.sleep(0.01)
        task.cancel()

    with caplog.at_level(logging.INFO, throughput.logger.name):
        asyncio.run(asyncio.wait_for(watch(), 30))
    assert caplog.records[0].getMessage().startswith("m: 0.0 prompt tokens/s")
