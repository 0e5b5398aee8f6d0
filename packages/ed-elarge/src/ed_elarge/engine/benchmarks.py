"""Benchmarks during training, on an engine that borrows the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ed_elarge.config.action_options import EvalOptions
from ed_elarge.engine.lending import engine_of_run
from ed_elarge.evaluation import harness
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_trainers.rollout import Weights


class EngineBenchmark:
    """Runs the tasks of `trainer.benchmarks`; see `ed_trainers.probes.Benchmark`.

    The results are written to `benchmarks/<step>.json` in the run's directory.

    Args:
        elm: The run: its tasks, the section `eval` and the section `esurge`.

    Raises:
        ConfigError: lm-eval is not installed, a task is unknown, or its data is not available.
    """

    def __init__(self, elm: eLargeModel):
        self._elm = elm
        arguments = elm.build_training_arguments()
        options = {**arguments.benchmark_options, "tasks": arguments.benchmarks}
        self._tasks = elm.prepare_eval(EvalOptions.model_validate(options))

    def __call__(self, tasks: Sequence[str], weights: Weights) -> dict[str, dict[str, float]]:
        """Run the tasks with the current weights, and return task -> metric -> value."""
        results = self._elm.config.directory / "benchmarks" / f"{weights.version}.json"
        with engine_of_run(self._elm, weights.model).serving(weights) as engine:
            metrics = harness.list_figures(self._tasks.run(engine, results))
        # The files contain the standard errors; curves of a run do not.
        return {
            task: {n: value for n, value in values.items() if not n.endswith(harness.ERROR)}
            for task, values in metrics.items()
        }
