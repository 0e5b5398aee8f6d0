"""Two processes, each of which reads its own rows, train as one that reads them all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ed_infra.testing import run_processes
from ed_trainers.figures.metrics import CLOCKED, read_metrics
from process_target import ROWS, STEPS, train

pytestmark = pytest.mark.xdist_group("several_processes")
TARGET = Path(__file__).parent / "process_target.py"
WHOLE = list(range(ROWS))
# Of two microbatches of four rows.
OWN = [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(("sft",), id="sft"),
        pytest.param(("kto", "bco", "dpo", "orpo"), id="others", marks=pytest.mark.nightly),
    ],
)
def test_each_process_reads_its_rows(tmp_path, methods):
    one, two = tmp_path / "one", tmp_path / "two"
    run_processes([TARGET, two, *methods], tmp_path / "logs", processes=2, devices=4)
    for method in methods:
        train(one / method, method)
        alone, together = (read_metrics(run / method / "metrics.jsonl") for run in (one, two))
        assert [row["step"] for row in together if "loss" in row] == list(range(1, STEPS + 1))
        for own, other in zip(together, alone, strict=True):
            assert own.keys() == other.keys()
            assert own.get("tokens") == other.get("tokens")
            for name in own.keys() - CLOCKED:
                np.testing.assert_allclose(own[name], other[name], rtol=2e-5, atol=1e-7)
        read = [json.loads((two / method / f"read_{i}.json").read_text()) for i in (0, 1)]
        for (trained, held_out), own in zip(read, OWN, strict=True):
            # In KTO an answer goes to the next row, so rows are not read apart.
            rows = WHOLE if method == "kto" else own
            assert trained == [[step, rows] for step in range(STEPS)]
            assert held_out in (None, [[step, rows] for step in range(2)])
