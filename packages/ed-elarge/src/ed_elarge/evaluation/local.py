"""Evaluations on local tasks (`eval.local_tasks`). The results have the form of lm-eval's."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ed_elarge.config.local_tasks import LOCAL_KINDS, LocalTask
from ed_elarge.config.sections import EvalSection

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge

    from ed_elarge.evaluation.answers import AnswerSample
    from ed_elarge.evaluation.text_model import TextModel

#: The value of `evaluator` in the results.
EVALUATOR = "ed-elarge"


@runtime_checkable
class Answering(Protocol):
    """A task whose evaluation has answers.

    Attributes:
        samples: Each answer of the last evaluation.
        shown: Number of samples in the summary of a run.
    """

    samples: list[AnswerSample]
    shown: int


class Evaluated(Protocol):
    """The rows of a task; the constructor receives the task and `limit`."""

    def evaluate(self, model: TextModel) -> dict[str, float]:
        """Return the metrics of a model."""
        ...


class LocalTasks:
    """The loaded tasks of one evaluation.

    Args:
        options: The section `eval`.
        tasks: The tasks to run.
        directory: The folder of the results (`results.json`), unless `output_path` is set.

    Attributes:
        options: The section `eval`.
        results: The file of the results, or None.

    Raises:
        DataError: A file cannot be read, or a row is broken.
    """

    def __init__(
        self, options: EvalSection, tasks: Sequence[LocalTask], directory: Path | None
    ) -> None:
        self.options = options
        self.results: Path | None = directory / "results.json" if directory else None
        if options.output_path is not None:
            self.results = Path(options.output_path)
        self._tasks = {task.label: task for task in tasks}
        self._loaded: dict[str, Evaluated] = {
            task.label: pkgutil.resolve_name(LOCAL_KINDS[task.type].evaluates)(task, options.limit)
            for task in tasks
        }

    def list_shown_samples(self) -> list[AnswerSample]:
        """Return the answers of the last evaluation that the summary of a run shows."""
        tasks = (task for task in self._loaded.values() if isinstance(task, Answering))
        return [sample for task in tasks for sample in task.samples[: task.shown]]

    def run(self, engine: eSurge, results_file: Path | None = None) -> dict[str, Any]:
        """Evaluate the model of an engine, and write the results to a file.

        Args:
            engine: The engine with the model.
            results_file: The file of the results; the default is `results`.
        """
        from ed_elarge.evaluation.text_model import TextModel

        options = self.options
        model = TextModel(engine, batch_size=options.batch_size, use_tqdm=options.use_tqdm)
        metrics = {name: task.evaluate(model) for name, task in self._loaded.items()}
        results = {
            "evaluator": EVALUATOR,
            "model": engine.model_name,
            "results": {
                name: {"alias": name, **{f"{metric},none": x for metric, x in task_metrics.items()}}
                for name, task_metrics in metrics.items()
            },
            "configs": {
                name: task.model_dump(mode="json", exclude_none=True)
                for name, task in self._tasks.items()
            },
        }
        samples = {
            name: task.samples for name, task in self._loaded.items() if isinstance(task, Answering)
        }
        if samples:
            results["samples"] = samples
        file = results_file or self.results
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", "utf-8")
        return results
