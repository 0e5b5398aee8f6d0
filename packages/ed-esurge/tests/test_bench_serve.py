"""`esurge bench serve`: arrivals, data sets, figures, saved results and their comparison."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from ed_esurge.command.bench import RequestTiming
from ed_esurge.command.bench_report import comparison, compute_metrics, parse_objectives, table
from ed_esurge.command.bench_serve import gaps
from ed_esurge.command.main import main
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine


def test_bench_serve_reports_the_figures_of_vllm_and_saves_them(tmp_path, capsys):
    engine = ScriptedEngine(lambda prompt, choice: "abcdefgh" * 8, max_model_len=4096)
    said = [{"from": "human", "value": f"tell me about {n} things"} for n in range(4)]
    answer = {"from": "gpt", "value": "these are five good words"}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [one, answer]} for one in said]))
    files = [str(tmp_path / name) for name in ("before.json", "after.json")]
    base = ["--num-prompts", "4", "--goodput", "ttft:60000", "tpot:60000"]
    with background(engine) as url:
        rate = ["--request-rate", "200", "--max-concurrency", "2", "--save-detailed"]
        data = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
        args = ["bench", "serve", "--url", url, *base]
        assert main([*args, *rate, *data, "--save-result", files[0]]) == 0
        shared = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2"]
        lengths = ["--prefix-repetition-prefix-len", "5", "--prefix-repetition-suffix-len", "3"]
        lengths += ["--prefix-repetition-output-len", "7"]
        assert main([*args, *shared, *lengths, "--json", "--save-result", files[1]]) == 0
    out = capsys.readouterr().out
    shown, printed = out.split("=\n{")
    first, second = (json.loads(Path(name).read_text()) for name in files)
    assert json.loads("{" + printed) == second
    for name in (
        "Successful requests",
        "Request goodput (req/s)",
        "Mean TPOT (ms)",
        "P99 ITL (ms)",
    ):
        assert f"{name}:" in shown
    assert (first["completed"], first["failed"], first["total_output_tokens"]) == (4, 0, 20)
    assert len(first["latencies"]) == len(first["start_times"]) == 4
    assert first["request_rate"] == 200 and second["request_rate"] == "inf"
    assert second["total_output_tokens"] == 28 and len(first["itls"][0]) == 4
    assert first["request_goodput"] == pytest.approx(4 / first["duration"])
    assert main(["bench", "serve", "--compare", *files]) == 0
    assert "total_output_tokens" in capsys.readouterr().out
    for more, message in (
        (["--goodput", "speed:1"], "LATENCY:MILLISECONDS"),
        (["--dataset-name", "sharegpt"], "requires --dataset-path"),
        (["--request-rate", "0"], "must be above 0"),
        (["--num-prompts", "0"], "num-prompts 0"),
        (["--dataset-name", "sharegpt", "--dataset-path", files[0]], "ShareGPT"),
    ):
        assert main(["bench", "serve", "--url", "http://127.0.0.1:9/v1", *more]) == 2
        assert message in capsys.readouterr().err


def test_arrivals_are_a_poisson_process_with_the_requested_rate():
    draws = gaps(random.Random(0), 5.0, 1.0, 20_000)
    assert statistics.fmean(draws) == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(draws) == pytest.approx(0.2, rel=0.03)  # exponential
    smooth = gaps(random.Random(0), 5.0, 4.0, 20_000)
    assert statistics.pstdev(smooth) == pytest.approx(0.1, rel=0.03)
    assert gaps(random.Random(0), float("inf"), 1.0, 2) == [0.0, 0.0]


def test_figures_equal_their_definitions():
    draw = np.random.default_rng(0)
    answers = []
    for _ in range(50):
        began = float(draw.uniform(0, 5))
        times = began + np.cumsum(draw.uniform(0.01, 0.3, draw.integers(2, 9)))
        answers.append(RequestTiming(began, [*map(float, times)], 10, len(times)))
    failed = RequestTiming(0.0, error="500")
    objectives = parse_objectives(["ttft:150", "tpot:160"])
    got = compute_metrics([*answers, failed], 8.0, objectives=objectives, percentiles=(90, 99))
    first = np.array([1000 * (a.arrivals[0] - a.began) for a in answers])
    each = np.array([1000 * np.diff(a.arrivals).mean() for a in answers])
    between = np.concatenate([1000 * np.diff(a.arrivals) for a in answers])
    for name, values in (("ttft", first), ("tpot", each), ("itl", between)):
        assert got[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert got[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert got[f"std_{name}_ms"] == pytest.approx(values.std())
        assert got[f"p90_{name}_ms"] == pytest.approx(np.percentile(values, 90))
        assert got[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99))
    good = int(((first <= 150) & (each <= 160)).sum())
    assert 0 < good < 50 and got["request_goodput"] == good / 8
    assert (got["completed"], got["failed"], got["total_input_tokens"]) == (50, 1, 500)
    assert got["total_token_throughput"] == (500 + got["total_output_tokens"]) / 8
    assert "P90 TTFT (ms):" in table(got, (90, 99))
    slower = {**got, "mean_ttft_ms": 2 * got["mean_ttft_ms"], "output_throughput": 1e6}
    lines = comparison(got, slower).splitlines()
    ends = {line.split()[0]: line for line in lines[1:]}
    assert ends["mean_ttft_ms"].endswith("+100.0 % worse")
    assert ends["output_throughput"].endswith("better")
