"""A run over a packed mixture that moves between meshes has the batches and losses of one mesh."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ed_infra.testing import run_processes
from ed_trainers.figures.metrics import read_metrics

from tests.multidevice.resuming_processes import train, write

pytestmark = pytest.mark.nightly

STEPS = 8


@pytest.mark.timeout(1200)
def test_run_resumes_on_other_meshes_and_host_counts(tmp_path: Path, record_property) -> None:
    write(tmp_path)
    one, moved = tmp_path / "one", tmp_path / "moved"
    train(tmp_path, one, STEPS, (1, 1, 1, 1, 1))
    train(tmp_path, moved, 2, (1, 8, 1, 1, 1))
    train(tmp_path, moved, 4, (1, 4, 1, 2, 1))
    train(tmp_path, moved, 6, (1, 1, 1, 1, 1))
    module = ["-m", "tests.multidevice.resuming_processes"]
    command = [*module, tmp_path, moved, str(STEPS), "1", "4", "1", "2", "1"]
    run_processes(command, tmp_path / "logs", processes=2, devices=4)
    # Two microbatches of four rows: each process prepares those of its devices.
    read = [json.loads((moved / f"read_{i}.json").read_text()) for i in range(2)]
    assert read == [[[0, 1, 4, 5]] * 2, [[2, 3, 6, 7]] * 2]
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (one, moved)]
    assert [[row["step"] for row in of] for of in rows] == [list(range(1, STEPS + 1))] * 2
    assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    losses = np.array([[row["loss"] for row in of] for of in rows])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    worst = np.abs(losses[1] / losses[0] - 1).max()
    record_property("summary", f"moved between four places: losses within {worst:.1e}")
