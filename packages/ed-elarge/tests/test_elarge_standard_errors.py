"""Evaluations have standard errors by default, computed without processes."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from ed_elarge.config.sections import EvalSection
from ed_elarge.evaluation import harness

metrics = pytest.importorskip("lm_eval.api.metrics")


@pytest.mark.daily("mean", "perplexity", "median")
@pytest.mark.parametrize("name", ["mean", "perplexity", "median", "f1_score"])
def test_default_options_give_a_standard_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multiprocessing, "Pool", None)
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    values = [(0, 1), (1, 1), (0, 0), (1, 0)] if name == "f1_score" else [0.0, 1.0, 1.0, 0.0, 1.0]
    with harness._without_processes():
        compute = metrics.stderr_for_metric(getattr(metrics, name), EvalSection().bootstrap_iters)
        assert compute(values) > 0
    assert "DISABLE_MULTIPROC" not in os.environ
    assert metrics.stderr_for_metric(metrics.mean, 0) is None


def test_metrics_are_shown_with_their_standard_errors() -> None:
    results = {"acc,none": 0.5, "acc_stderr,none": 0.025, "f1,none": 0.25, "f1_stderr,none": "N/A"}
    figures = harness.list_figures({"results": {"task": {"alias": "task", **results}}})
    assert figures == {"task": {"acc": 0.5, "acc_stderr": 0.025, "f1": 0.25}}
    assert harness.describe_metrics(figures["task"]) == {"acc": "0.5000 ± 0.0250", "f1": "0.2500"}
