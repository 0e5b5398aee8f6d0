"""`vllm bench serve` measures this server, and its figures are those of `esurge bench serve`.

See `test_replies_reference.py` for the environment with vLLM.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from ed_esurge.command.bench import RequestTiming
from ed_esurge.command.bench_report import compute_metrics, parse_objectives, read_result, table
from ed_esurge.command.main import main
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer

PYTHON = os.environ.get("EASYDEL_VLLM_PYTHON")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PYTHON is None, reason="EASYDEL_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(600),
]
PROGRAM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
GOALS = ["--goodput", "ttft:30", "tpot:3", "--metric-percentiles", "90,99"]
LOAD = ["--num-prompts", "12", "--request-rate", "40", "--max-concurrency", "3"]
DATA = ["--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "24"]
#: Keys of vLLM's file without a counterpart: settings of vLLM, recordings, and texts.
ONLY_VLLM = {
    "endpoint_type", "label", "tokenizer_id", "rtfx", "queue_times", "generated_texts",
}  # fmt: skip


def names(text: str) -> list[str]:
    """Return the headings and the names of a table in their order."""
    return re.findall(r"^(?:(.+?):  +[\d.]+ *|[-=]+(?: ?[A-Z].*?)?[-=]+)$", text, re.MULTILINE)


def test_figures_and_columns_equal_those_of_vllm(tmp_path: Path, capsys) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    engine = ScriptedEngine(lambda prompt, choice: "abcdefgh" * 20, max_model_len=4096, delay=0.002)
    with background(engine) as url:
        arguments = ["--backend", "openai", "--base-url", url.removesuffix("/v1")]
        arguments += ["--model", "scripted", "--tokenizer", str(tmp_path / "tokenizer")]
        arguments += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
        arguments += ["--save-detailed", "--result-dir", str(tmp_path)]
        arguments += ["--result-filename", "theirs.json"]
        done = subprocess.run(
            [str(PYTHON), "-c", PROGRAM, *arguments, *LOAD, *DATA, *GOALS],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        own = ["bench", "serve", "--url", url, "--save-result", str(tmp_path / "ours.json")]
        assert main([*own, "--save-detailed", *LOAD, *DATA, *GOALS]) == 0
    printed = capsys.readouterr().out
    assert len(names(printed)) > 25
    assert names(printed) == names(done.stdout[done.stdout.index("=====") :])
    theirs, ours = (read_result(tmp_path / f"{name}.json") for name in ("theirs", "ours"))
    assert set(theirs) - set(ours) <= ONLY_VLLM
    # The figures of vLLM for its own measurements.
    answers = []
    lists = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    for start, first, gaps, inputs, outputs in zip(*map(theirs.get, lists), strict=True):
        arrivals = [start + first]
        for gap in gaps:
            arrivals.append(arrivals[-1] + gap)
        answers.append(RequestTiming(start, arrivals, inputs, outputs))
    goals = parse_objectives(["ttft:30", "tpot:3"])
    again = compute_metrics(answers, theirs["duration"], objectives=goals, percentiles=(90, 99))
    assert len(again) > 25
    for name, value in again.items():
        assert value == pytest.approx(theirs[name], rel=1e-6), name
    assert names(table({**ours, **again}, (90, 99))) == names(printed)
    assert json.dumps(again)
