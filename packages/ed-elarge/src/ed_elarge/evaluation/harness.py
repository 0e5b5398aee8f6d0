"""lm-evaluation-harness on the engine. Tasks load before training, and results are JSON files."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError, did_you_mean

from ed_elarge import heldout_tasks
from ed_elarge.config.sections import EvalSection

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge

# Variable of lm-eval; set, it computes standard errors without processes of its own.
_ONE_PROCESS = "DISABLE_MULTIPROC"
#: End of the names of standard errors.
ERROR = "_stderr"


class Tasks:
    """The loaded tasks of one evaluation.

    Args:
        options: Task names, and folders with further tasks (`include_path`).
        held_out: Returns the held-out texts of the run, for tasks that are built from them.
        directory: The folder for task files (`tasks`) and for the results (`results.json`, unless
            `options.output_path` is set). None: task files are temporary, and results are written
            only to `options.output_path`.

    Attributes:
        results: The file of the results, or None.

    Raises:
        ConfigError: lm-eval is not installed, a task is unknown, or its data is not available.
    """

    def __init__(
        self, options: EvalSection, held_out: Callable[[], Sequence[str]], directory: Path | None
    ) -> None:
        if find_spec("lm_eval") is None:
            raise ConfigError("eval needs lm-eval: pip install 'ed-esurge[lm-eval]'")
        from lm_eval.tasks import TaskManager

        local = [name for name in options.tasks if name in heldout_tasks.HELDOUT_TASKS]
        paths: list[str | Path] = [*options.include_path]
        if local:
            if directory is None:
                self._temporary = TemporaryDirectory(
                    prefix="elarge-tasks-"
                )  # lives as long as self
                folder = Path(self._temporary.name)
            else:
                folder = directory / "tasks"
            paths.append(str(heldout_tasks.write_tasks(held_out(), folder, local)))
        # lm-eval's own tasks are thousands of files: list them only if one of them is needed.
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
        task_names = [*self.manager.all_tasks, *heldout_tasks.HELDOUT_TASKS]
        for name in self.options.tasks:
            if name not in self.manager.all_tasks:
                raise ConfigError(
                    f"unknown task {name!r}{did_you_mean(name, task_names)} (lm-eval lists its "
                    "tasks with: lm-eval ls tasks)"
                )

    def _check_data(self, names: list[str]) -> None:
        """Load the data of lm-eval's own tasks before training starts."""
        for name in names:
            try:
                self.manager.load(name)
            except Exception as error:  # data sets raise arbitrary errors
                reason = str(error).strip().splitlines()
                detail = f"{type(error).__name__}: {reason[0] if reason else ''}"
                raise ConfigError(f"the task {name!r} cannot be loaded ({detail})") from error

    def run(self, engine: eSurge, results_file: Path | None = None) -> dict[str, Any]:
        """Evaluate the model and write the results to a file.

        Args:
            engine: The engine with the model.
            results_file: The file of the results; the default is `results`.

        Returns:
            The results of lm-eval as JSON values.
        """
        from ed_esurge.lm_eval import eSurgeLM
        from lm_eval import evaluator

        evaluator.get_git_commit_hash = _commit
        options = self.options
        adapter = eSurgeLM(
            engine, max_gen_toks=options.max_new_tokens, batch_size=options.batch_size
        )
        if not options.use_tqdm:
            for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
                setattr(adapter, name, functools.partial(getattr(adapter, name), disable_tqdm=True))
        sampling = {"temperature": options.temperature, "top_p": options.top_p}
        keywords: dict[str, Any] = {k: value for k, value in sampling.items() if value is not None}
        if options.temperature:
            keywords["do_sample"] = True
        keywords |= options.gen_kwargs or {}
        with _without_processes():
            results = evaluator.simple_evaluate(
                model=adapter,
                tasks=list(options.tasks),
                task_manager=self.manager,
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
                confirm_run_unsafe_code=options.confirm_run_unsafe_code,
            )
        text = json.dumps(results, indent=2, ensure_ascii=False, default=_encode_value) + "\n"
        file = results_file or self.results
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        return json.loads(text)


@contextmanager
def _without_processes() -> Iterator[None]:
    """Compute standard errors in this process: a fork of a process with devices can hang."""
    previous_value = os.environ.get(_ONE_PROCESS)
    os.environ[_ONE_PROCESS] = "1"
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[_ONE_PROCESS]
        else:
            os.environ[_ONE_PROCESS] = previous_value


def list_figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return task -> metric -> value, without lm-eval's filters, aliases and missing errors."""
    out: dict[str, dict[str, float]] = {}
    for task, values in results.get("results", {}).items():
        out[task] = {
            name.split(",")[0]: value
            for name, value in values.items()
            if isinstance(value, float) and "," in name
        }
    return out


def add_plain_names(results: dict[str, Any]) -> dict[str, Any]:
    """Return results whose metrics also have names without a filter: `acc` beside `acc,none`.

    Of several filters, the last has the plain name, as in `list_figures`.
    """
    tasks = {
        task: {name.split(",")[0]: value for name, value in values.items()} | values
        for task, values in results["results"].items()
    }
    return {**results, "results": tasks}


def describe_metrics(metrics: dict[str, float]) -> dict[str, str]:
    """Return each metric to print as text, with its standard error."""
    texts = {}
    for name, value in select_metrics(metrics).items():
        error = metrics.get(f"{name}{ERROR}")
        if not name.endswith(ERROR):
            texts[name] = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
    return texts


def select_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics to print; the files contain all metrics.

    Bits per byte are comparable between tokenizers. The perplexities per word and per byte express
    the same quantity in other units.
    """
    if "bits_per_byte" not in metrics:
        return metrics
    return {k: v for k, v in metrics.items() if k not in ("word_perplexity", "byte_perplexity")}


def _commit() -> str | None:
    """Return the commit of the working folder, or None.

    lm-eval's own function lets git print an error in a folder without a repository.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _encode_value(value: object) -> object:
    """Convert a numpy number to a Python number, and other non-JSON values to text."""
    item = getattr(value, "item", None)
    return item() if item is not None else str(value)
