"""Loss, metrics and gradients of each method equal those of TRL's trainers, or of its paper."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from ed_infra.testing import require_torch
from ed_trainers.arguments import METHODS

from tools import method_table

require_torch()
for needed in ("trl", "datasets"):
    pytest.importorskip(needed)

from tests.parity.method_cases import CASES  # noqa: E402 - imports torch inside, but is slow to collect
from tests.parity.method_cases.runs import RUNS, STEPS  # noqa: E402

#: Methods whose first case every run compares: one of each kind of loss. The others are nightly.
USUAL = {"sft", "dpo", "grpo", "ppo", "embedding"}


def method_of(case: str) -> str:
    """Return the method of a case such as `dpo sigmoid` or `contrastive, CLIP`."""
    return case.split()[0].rstrip(",")


#: First case of each method.
FIRST = {
    next(case for case in CASES if method_of(case) == method): method
    for method in METHODS
    if any(method_of(case) == method for case in CASES)
}


def nightly(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.nightly)


def test_every_method_has_a_parity_comparison() -> None:
    assert {*FIRST.values()} == {*METHODS}


@pytest.mark.parametrize(
    "name",
    [name if FIRST.get(name) in USUAL else nightly(name) for name in CASES],
)
@pytest.mark.daily("sft")
def test_method_losses_match_reference(name: str, record_property) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CASES[name].measure()
    shown = ", ".join(f"{figure} {error:.1e}" for figure, error in found.items())
    record_property("summary", f"{name} against {CASES[name].reference}: {shown}")
    assert all(error <= method_table.LIMIT for error in found.values()), shown


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_parameters_of_a_run_match_those_of_trl(name: str, record_property) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = RUNS[name]()
    shown = ", ".join(f"{figure} {error:.1e}" for figure, error in found.items())
    record_property("summary", f"{STEPS} steps of {name}: {shown}")
    assert all(found[name] <= limit for name, limit in method_table.RUN_LIMITS.items()), shown


def test_methods_page_has_row_for_each_comparison() -> None:
    results, runs = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (method_table.RESULTS, method_table.RUNS)
    )
    assert {*results} == {*CASES} and {*runs} == {*RUNS}
    assert all(value <= method_table.LIMIT for of in results.values() for value in of.values())
    limits = method_table.RUN_LIMITS
    assert all(of[name] <= limit for of in runs.values() for name, limit in limits.items())
    written = method_table.PAGE.read_text(encoding="utf-8")
    assert written == method_table.page(), "run: uv run python -m tools.method_table"
