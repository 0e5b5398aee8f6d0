"""Compiled steps keep ceilings of launches, bytes and temporary buffers.

The nightly tests compile for a GPU without a GPU. They need jax's plugin for CUDA: see
`elarge plan --compile gpu` in docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from ed_elarge.plan.compiled import CUDA_VARIABLE, find_cuda_packages
from ed_infra.errors import ConfigError

from tools.bench import gpu_programs
from tools.workspace import ROOT


def has_cuda_plugin() -> bool:
    """Return whether steps can be compiled for GPUs here."""
    try:
        find_cuda_packages()
    except ConfigError:
        return False
    return True


def test_documented_table_is_that_of_the_stored_counts():
    page = (ROOT / "docs/plan.md").read_text("utf-8")
    assert gpu_programs.write_table() in page


def test_table_shows_counts_before_and_after(monkeypatch: pytest.MonkeyPatch):
    counts = {"launches_per_layer": 20.0, "pool_copies": 0.0, "seconds": 0.004, "tokens": 128.0}
    counts |= {"host_loops": 1.0, "host_branches": 2.0, "bytes": 2.0**31, "temporary": 2.0**29}
    results: dict[str, Any] = {
        "before": {"llama-1b": {"decode step": counts}},
        "after": {"llama-1b": {"decode step": {**counts, "seconds": 0.002}}},
    }
    monkeypatch.setattr(gpu_programs, "read_results", lambda: results)
    row = gpu_programs.write_table().splitlines()[-1]
    assert row == (
        "| llama-1b: decode | 20.0 | 3 | 0 | 2.0 | 0.50 | 4.00 → 2.00 | 32,000 → 64,000 |"
    )


@dataclass(frozen=True)
class Ceiling:
    """Largest counts of a step of two layers: launches, branches, and moved and temporary GiB."""

    launches: float
    branches: float
    moved: float
    temporary: float


#: Model and step -> about five percent above the counts.
CEILINGS = {
    ("llama-1b", "decode step"): Ceiling(launches=68, branches=1, moved=1.62, temporary=0.33),
    ("qwen3-30b-a3b", "decode step"): Ceiling(launches=116, branches=1, moved=8.0, temporary=0.54),
    # A mask of [s, s] would need two GiB.
    ("llama-8b", "packed attention"): Ceiling(launches=20, branches=2, moved=4.3, temporary=1.05),
}


@pytest.mark.nightly
@pytest.mark.skipif(not has_cuda_plugin(), reason=f"jax's plugin for CUDA ({CUDA_VARIABLE})")
@pytest.mark.parametrize(("name", "step_name"), CEILINGS)
def test_compiled_step_keeps_its_ceilings(name: str, step_name: str):
    ceiling = CEILINGS[name, step_name]
    layers = {"num_hidden_layers": 2}
    step = gpu_programs.measure_in_child(name, [step_name], 30.0, layers)[step_name]
    assert step["pool_copies"] == 0
    assert step["host_loops"] == 0
    assert step["host_branches"] <= ceiling.branches
    assert step["launches"] <= ceiling.launches
    assert step["bytes"] <= ceiling.moved * gpu_programs.GIB
    assert step["temporary"] <= ceiling.temporary * gpu_programs.GIB
