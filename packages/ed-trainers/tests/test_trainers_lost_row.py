"""A process is lost between a step and the row of the step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from copy_target import LOST
from ed_infra.testing import started_processes
from ed_trainers.figures.metrics import read_metrics

TARGET = Path(__file__).parent / "copy_target.py"

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("several_processes")]


def test_no_copy_of_a_step_outlives_a_process_that_did_not_write_its_row(tmp_path) -> None:
    with started_processes([TARGET, tmp_path], tmp_path / "logs", devices=2) as running:
        end = time.monotonic() + 120
        # The other process fails at its next exchange with the lost one.
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            time.sleep(0.05)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, LOST)]
    copies = {path.stem for path in tmp_path.glob("memory-*/*.copy")}
    assert str(LOST - 1) in copies
    assert str(LOST) not in copies
