"""Benchmarks while a model learns: tasks of lm-eval by an engine that borrows the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ed_elarge import evaluation
from ed_elarge.action_options import EvalOptions
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_esurge import eSurge
    from ed_trainers.rollout import Weights


class EngineBenchmark:
    """Runs the tasks of `trainer.benchmarks`; see `ed_trainers.probes.Benchmark`.

    Results stand in `benchmarks/<step>.json` in the run's directory, as lm-eval writes them.

    Args:
        elm: names the tasks, how they are run (`eval`) and the engine (`esurge`).

    Raises:
        ConfigError: lm-eval is not installed, a task does not exist, or its data cannot be had.
    """

    def __init__(self, elm: eLargeModel):
        self._elm = elm
        self._engine: eSurge | None = None
        self._tasks = elm.prepare_eval(EvalOptions(tasks=elm.build_training_arguments().benchmarks))

    def __call__(self, tasks: Sequence[str], weights: Weights) -> dict[str, dict[str, float]]:
        """Run the tasks with the weights that are being trained: task -> metric -> value."""
        from ed_esurge import eSurge
        from ed_esurge.core.commands import DropWeights
        from ed_trainers.value_head import without_value_head

        model = without_value_head(weights.model)
        if self._engine is None:
            self._engine = eSurge(model, self._elm.part("tokenizer"), self._elm.config.esurge)
            self._engine.execute(DropWeights())  # it has them within calls only
        results = self._elm.config.directory / "benchmarks" / f"{weights.version}.json"
        with self._engine.weights(model):
            return evaluation.figures(evaluation.run(self._engine, self._tasks, results))
