"""Two processes train, save and resume as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ed_infra.testing import run_processes
from ed_trainers.figures.metrics import read_metrics
from safetensors.numpy import load_file

from tests.multidevice.training_processes import train

pytestmark = pytest.mark.nightly


def losses(folder: Path) -> list[float]:
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_two_processes_train_and_resume(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for steps in (2, 4):
        command = ["-m", "tests.multidevice.training_processes", two, str(steps)]
        run_processes(command, tmp_path / f"logs_{steps}", processes=2, devices=4)
        assert len(losses(two)) == steps
    train(one, 4)
    assert losses(one)[-1] < losses(one)[0]
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-6)
    weights, resumed = (load_file(run / "model/model.safetensors") for run in (one, two))
    assert weights.keys() == resumed.keys()
    for name, value in weights.items():
        # Adam divides by the root of squares, which amplifies the last bits of small gradients.
        worst = np.abs(resumed[name] - value).max() / np.abs(value).max()
        assert worst <= 1e-4, (name, worst)
