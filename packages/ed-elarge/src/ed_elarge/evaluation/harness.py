"""lm-evaluation-harness over eSurge: tasks found before training starts, results kept as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError, did_you_mean

from ed_elarge import heldout_tasks
from ed_elarge.config.sections import EvalSection

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge


class Tasks:
    """The tasks of one evaluation, loaded: a wrong name or a missing data set shows here.

    Args:
        options: names, and where else to look (`include_path`).
        held_out: reads the run's held-out texts, for the tasks that are made from them.
        directory: Task files go to its folder `tasks`, and results to its file `results.json`,
            unless `options.output_path` names another file. None: task files go to a temporary
            folder, and results are written to `options.output_path` alone.

    Attributes:
        results: the file of the results, or None.

    Raises:
        ConfigError: lm-eval is not installed, a task does not exist, or its data cannot be had.
    """

    def __init__(
        self, options: EvalSection, held_out: Callable[[], Sequence[str]], directory: Path | None
    ) -> None:
        if find_spec("lm_eval") is None:
            raise ConfigError("eval needs lm-eval: pip install 'ed-esurge[lm-eval]'")
        from lm_eval.tasks import TaskManager

        local = [name for name in options.tasks if name in heldout_tasks.NAMES]
        paths: list[str | Path] = [*options.include_path]
        if local:
            if directory is None:
                self._temporary = TemporaryDirectory(
                    prefix="elarge-tasks-"
                )  # lives as long as self
                folder = Path(self._temporary.name)
            else:
                folder = directory / "tasks"
            paths.append(str(heldout_tasks.write(held_out(), folder, local)))
        # lm-eval's own tasks are thousands of files: they are listed only when one is asked for
        self.manager = TaskManager(include_path=paths or None, include_defaults=False)
        if any(name not in self.manager.all_tasks for name in options.tasks):
            self.manager = TaskManager(include_path=paths or None, include_defaults=True)
        self.options = options
        self.results: Path | None = directory / "results.json" if directory else None
        if options.output_path is not None:
            self.results = Path(options.output_path)
        self._check_names()
        self._check_data([name for name in options.tasks if name not in local])

    def _check_names(self) -> None:
        known = [*self.manager.all_tasks, *heldout_tasks.NAMES]
        for name in self.options.tasks:
            if name not in self.manager.all_tasks:
                raise ConfigError(
                    f"unknown task {name!r}{did_you_mean(name, known)} (lm-eval lists its "
                    "tasks with: lm-eval ls tasks)"
                )

    def _check_data(self, names: list[str]) -> None:
        """Load the data of tasks that are not ours, so that none is missing after training."""
        for name in names:
            try:
                self.manager.load(name)
            except Exception as error:  # whatever a task's data set raises
                reason = str(error).strip().splitlines()
                detail = f"{type(error).__name__}: {reason[0] if reason else ''}"
                raise ConfigError(f"the task {name!r} cannot be loaded ({detail})") from error


def run(engine: eSurge, tasks: Tasks, results_file: Path | None = None) -> dict[str, Any]:
    """Evaluate, and write the results to their file.

    Args:
        engine: Answers the requests.
        tasks: The tasks.
        results_file: The file of the results; None takes `tasks.results`.

    Returns:
        The results of lm-eval, with JSON values only.
    """
    from ed_esurge.lm_eval import eSurgeLM
    from lm_eval.evaluator import simple_evaluate

    options = tasks.options
    adapter = eSurgeLM(engine, max_gen_toks=options.max_new_tokens, batch_size=options.batch_size)
    if not options.use_tqdm:
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(adapter, name, functools.partial(getattr(adapter, name), disable_tqdm=True))
    sampling = {"temperature": options.temperature, "top_p": options.top_p}
    keywords: dict[str, Any] = {k: value for k, value in sampling.items() if value is not None}
    if options.temperature:
        keywords["do_sample"] = True
    keywords |= options.gen_kwargs or {}
    results = simple_evaluate(
        model=adapter,
        tasks=list(options.tasks),
        task_manager=tasks.manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        cache_requests=options.cache_requests,
        check_integrity=options.check_integrity,
        write_out=options.write_out,
        log_samples=options.log_samples,
        bootstrap_iters=options.bootstrap_iters,
        apply_chat_template=options.apply_chat_template,
        system_instruction=options.system_instruction,
        fewshot_as_multiturn=options.fewshot_as_multiturn,
        gen_kwargs=keywords or None,
        predict_only=options.predict_only,
        random_seed=options.random_seed,
        numpy_random_seed=options.numpy_random_seed,
        fewshot_random_seed=options.fewshot_random_seed,
    )
    text = json.dumps(results, indent=2, ensure_ascii=False, default=_plain) + "\n"
    file = results_file or tasks.results
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return json.loads(text)


def figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Task -> metric -> value, without lm-eval's filters, aliases and missing errors."""
    out: dict[str, dict[str, float]] = {}
    for task, values in results.get("results", {}).items():
        out[task] = {
            name.split(",")[0]: value
            for name, value in values.items()
            if isinstance(value, float) and "," in name
        }
    return out


def shown(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that are printed; the others stay in the files.

    Bits per byte compare models of any tokenizer. The perplexities per word and per byte are the
    same figure in other units, and per word a small model has tens of thousands.
    """
    if "bits_per_byte" not in metrics:
        return metrics
    return {k: v for k, v in metrics.items() if k not in ("word_perplexity", "byte_perplexity")}


def _plain(value: object) -> object:
    """numpy numbers as numbers; anything else that JSON lacks as text."""
    item = getattr(value, "item", None)
    return item() if item is not None else str(value)
