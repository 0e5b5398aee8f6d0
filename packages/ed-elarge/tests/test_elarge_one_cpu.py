"""Training on one CPU: separate layers unless the run file scans them, and plausible speeds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest
from ed_elarge.building.parts import SMALL_MOMENTS, build_layout, choose_run_layout
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_esurge.model import choose_layout
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.options.optimizers import OPTIMIZERS
from run_files import small, with_texts

PROGRAM = """
import json, sys
from ed_elarge import eLargeModel
from run_files import run

settings = json.load(sys.stdin)
assert run(settings) == 0
print(eLargeModel(settings).build_model().model.layers.layout)
"""


def layout_after(settings: dict[str, Any]) -> str:
    """Execute a run in a process with one device; return the layout of a model of the run."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(settings),
        env={
            **os.environ,
            "XLA_FLAGS": "",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parent),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("policy", "optimizer", "devices", "separate"),
    [
        ("", "adamw", 1, True),
        ("", "", 1, True),
        ("", "adamw", 8, False),
        ("nothing_saveable", "adamw", 1, False),
        ("", "adafactor", 1, False),
    ],
)
def test_layers_are_separate_on_one_cpu_unless_memory_is_saved(
    monkeypatch, policy, optimizer, devices, separate
):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert build_layout(policy, optimizer) == ({"scan_layers": False} if separate else {})


@pytest.mark.parametrize(("backend", "trains"), [("gpu", False), ("gpu", True), ("tpu", False)])
def test_layers_are_separate_on_gpus_that_only_serve(monkeypatch, backend, trains):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    model = {"config": {"model_type": "llama"}, "tokenizer": "none"}
    values: dict[str, Any] = {"model": model, "actions": ["serve"]}
    if trains:
        values |= {"trainer": {"trainer_type": "sft"}, "actions": ["train"]}
        values["mixture"] = {"informs": [{"type": "json", "data_files": "rows.jsonl"}]}
    run = normalize(Document("run.yaml", value=values))
    layout = choose_run_layout(run)
    assert layout == ({} if trains else choose_layout(backend))


def test_small_moments_are_those_of_the_optimizers():
    assert set(SMALL_MOMENTS) < set(OPTIMIZERS)


@pytest.mark.nightly
def test_run_of_scanned_layers_continues_with_separate_ones(tmp_path):
    settings = small(with_texts(tmp_path), actions=["train"])
    settings["trainer"] |= {"max_training_steps": 6, "save_steps": 3, "log_steps": 1}
    settings["model"]["config"]["scan_layers"] = True
    assert layout_after(settings) == "stacked"
    record = tmp_path / "run" / "metrics.jsonl"
    scanned = [row for row in read_metrics(record) if "loss" in row]

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    del settings["model"]["config"]["scan_layers"]
    assert layout_after(settings) == "leaves"
    rows = [row for row in read_metrics(record) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for now, before in zip(rows, scanned, strict=True):
        assert now["loss"] == pytest.approx(before["loss"], rel=1e-5)

    timed = [(a, b) for a, b in pairwise(rows) if "tokens_per_second" in b]
    assert [after["step"] for _, after in timed] == [2, 3, 5, 6], "the others were compiled"
    for before, after in timed:
        least = after["tokens"] / (after["time"] - before["time"])
        assert after["tokens_per_second"] > 0.9 * least
        assert after["tokens_per_second"] < 1000 * least, "no step takes no time"
