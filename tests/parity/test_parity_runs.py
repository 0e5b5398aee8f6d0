"""Losses of whole runs beside torch in float64: the optimizer, the accumulation and the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.bench.easydel import METHODS, ROWS, run_here, write_case, write_run_file
from tools.bench.float64_losses import compute_losses

pytestmark = [pytest.mark.nightly, pytest.mark.torch]
STEPS = 6


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("case")
    write_case(folder, count=ROWS * STEPS)
    return folder


def losses_of(case: Path, method: str, **options: Any) -> list[float]:
    run = run_here(write_run_file(case, method, STEPS, **options))
    assert not run.error, run.error
    return run.losses


@pytest.mark.parametrize("method", METHODS)
def test_losses_of_a_run_equal_those_of_torch_in_float64(case: Path, method: str) -> None:
    exact = compute_losses(case, method, STEPS, ROWS)
    accumulated = losses_of(case, method, gradient_accumulation_steps=2)
    np.testing.assert_allclose(accumulated, exact, rtol=1e-4)


def test_weight_decay_of_a_reward_run_leaves_out_norms(case: Path) -> None:
    """A loop of torch that also decays the norms is up to a thousandth away after one step."""
    exact = compute_losses(case, "reward", STEPS, ROWS, decay=0.3)
    found = losses_of(case, "reward", weight_decay=0.3)
    np.testing.assert_allclose(found, exact, rtol=1e-4)
    everything = compute_losses(case, "reward", STEPS, ROWS, decay=0.3, all_decay=True)
    assert everything[0] == exact[0]
    assert max(abs(a / b - 1) for a, b in zip(everything[1:], exact[1:], strict=True)) > 5e-4
