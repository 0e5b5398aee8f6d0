"""The summary of a run: metrics, evaluation, file locations and suggested next commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from ed_esurge.command.program import show_result
from ed_infra.chats import Chat, Prompt
from ed_infra.enums import TaskType

from ed_elarge.config.checks.training import GENERATING
from ed_elarge.evaluation import harness
from ed_elarge.evaluation.local import EVALUATOR
from ed_elarge.evaluation.prompts import find_question

if TYPE_CHECKING:
    from ed_trainers.trainer import TrainerOutput
    from rich.table import Table

    from ed_elarge.config.run_config import RunConfig
    from ed_elarge.evaluation.heldout_metrics import HeldoutMetrics


SUMMARY = "summary.json"

#: Tasks of models that the engine does not serve.
_NOT_SERVED = (
    TaskType.MASKED_LM,
    TaskType.TOKEN_CLASSIFICATION,
    TaskType.QUESTION_ANSWERING,
    TaskType.MULTIPLE_CHOICE,
    TaskType.IMAGE_CLASSIFICATION,
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION,
)


#: Error rates of transcripts: name of the metric -> name in the table.
_ERROR_RATES = {"wer": "word error rate", "cer": "character error rate"}
#: A data set of the hub.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Characters of a text in the table of answers.
_MOST_SHOWN = 400
#: Characters of a chat in the suggested request.
_REQUEST_LENGTH = 600


@dataclass
class ActionSample:
    """A prompt, and the completion of the model.

    Attributes:
        before: The completion before training, or None.
        expected: The right answer, or None.
        trains_later: Whether the completion itself is from before training.
    """

    prompt: Prompt
    completion: str
    before: str | None = None
    expected: str | None = None
    trains_later: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the texts by name, without those that are missing."""
        optional = {"before": self.before, "expected": self.expected}
        texts = {name: text for name, text in optional.items() if text is not None}
        return {"prompt": self.prompt, "completion": self.completion, **texts}


class Summary:
    """Collects the results of the actions and prints them once."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.base: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.heldout: HeldoutMetrics | None = None
        self.evaluation: dict[str, dict[str, float]] = {}
        self.results: Path | None = None
        self.local: set[str] = set()
        #: The evaluation before training, by task.
        self.early_evaluation: dict[str, dict[str, float]] = {}
        self.samples: list[ActionSample] = []
        #: The first question of the training data, if it consists of chats.
        self.question: Chat | None = None
        self.task = TaskType.CAUSAL_LM
        self.training: list[str] = []
        #: What was trained, on which data and hardware.
        self.facts: dict[str, str] = {}
        self.datasets: list[str] = []
        #: The stored summary of a run that had finished before.
        self._recorded: dict[str, Any] = {}
        self._shown = False

    @property
    def model(self) -> Path | None:
        """Directory of the trained model, or None if it was not saved."""
        path = self.directory / "model" if self.directory is not None else None
        return path if path is not None and (path / "config.json").is_file() else None

    @property
    def adapter(self) -> Path | None:
        """Directory of the adapters, or None; a merged model is saved next to it."""
        path = self.directory / "adapter" if self.directory is not None else None
        return path if path is not None and (path / "adapter_config.json").is_file() else None

    def record_training(self, output: TrainerOutput, run: RunConfig) -> None:
        """Record the results of training."""
        self.directory = run.directory
        self.base = {k: run.written[k] for k in ("model", "quantization") if run.written.get(k)}
        self.metrics = dict(output.metrics)
        if output.trained_steps == 0:
            self._recorded = _read_summary(run.directory / SUMMARY)
            self.metrics |= self._recorded.get("metrics", {})
        self.question = find_question(run)
        self.task = run.task
        sources = run.mixture.informs if run.mixture is not None else ()
        files = [source.data_files or source.type for source in sources]
        names = [f if isinstance(f, str) else ", ".join(map(str, f)) for f in files if f]
        types = [source.type for source in sources]
        self.datasets = [name for name in map(str, types) if _HUB_ID.fullmatch(name)]
        self.training = [f"- Method: `{run.method}`", *(f"- Data: `{name}`" for name in names)]
        self.facts = self._recorded.get("run") or _describe_run(run, names)

    def record_sample(
        self,
        prompt: Prompt,
        completion: str,
        *,
        expected: str | None = None,
        trains_later: bool = False,
    ) -> None:
        """Record a completion; a completion before training belongs to the later one."""
        sample = ActionSample(prompt, completion, None, expected, trains_later)
        for number, earlier in enumerate(self.samples):
            if earlier.trains_later and not trains_later and earlier.prompt == prompt:
                sample.before = earlier.completion
                self.samples[number] = sample
                return
        self.samples.append(sample)

    def record_evaluation(
        self, results: dict[str, Any], path: Path | None, *, trains_later: bool = False
    ) -> None:
        """Record the metrics of an evaluation and the file with its results."""
        figures = harness.list_figures(results)
        (self.early_evaluation if trains_later else self.evaluation).update(figures)
        if results.get("evaluator") == EVALUATOR:
            self.local |= set(results["results"])
        self.results = path

    def print_location_of_model(self) -> None:
        """Print the location of the trained model after a later action failed."""
        model_path = self.model or self.adapter
        if model_path is not None:
            print(f"the trained model is kept: {model_path}", file=sys.stderr)

    def print_evaluation(self, results: dict[str, Any], *, trains_later: bool = False) -> None:
        """Print a line for each metric of an evaluation."""
        when = " before training" if trains_later else ""
        for task, metrics in harness.list_figures(results).items():
            for name, text in harness.describe_metrics(metrics).items():
                show_result(f"{task}{when}: {name} {text}")

    def show(self) -> None:
        """Print the summary and write its figures to the run's directory, in process 0."""
        if self._shown or not (self.directory or self.evaluation):
            return
        self._shown = True
        from ed_infra.distributed import is_main

        if not is_main():
            return
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False)
        table = Table(title="Summary", show_header=False, title_justify="left")
        for name, value, note in self._rows():
            table.add_row(name, value, note)
        with console.capture() as printed:
            console.print(table)
            if any(sample.before is not None for sample in self.samples):
                console.print(self._compare_answers())
            if self.directory is not None:
                self._keep(self.directory)
                console.print(self._places(self.directory), soft_wrap=True, markup=False)
            elif self.results is not None:
                console.print(f"evaluation  {self.results}", soft_wrap=True, markup=False)
        show_result(printed.get().rstrip("\n"))

    def to_dict(self) -> dict[str, Any]:
        """Return the results for `--json`, those of `summary.json` and the places of files."""
        places = {"directory": self.directory, "model": self.model, "adapter": self.adapter}
        return {**self._collect_figures(), **places, "results": self.results}

    def _collect_figures(self) -> dict[str, Any]:
        recorded = self._recorded
        samples = [sample.to_dict() for sample in self.samples]
        learned = self.heldout.to_dict() if self.heldout is not None else None
        return {
            "run": self.facts,
            "metrics": self.metrics,
            "learned": recorded.get("learned") or learned,
            "evaluation": {**recorded.get("evaluation", {}), **self.evaluation},
            "evaluation_before_training": {
                **recorded.get("evaluation_before_training", {}),
                **self.early_evaluation,
            },
            "samples": samples or recorded.get("samples", []),
        }

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = []
        if "steps" in self.metrics:
            rows.append(("steps", f"{self.metrics['steps']:.0f}", ""))
        # The trainer adds `train_<name>` for each metric in its progress columns.
        names = [n.removeprefix("train_") for n in self.metrics if n.startswith("train_")]
        rows += [(f"training {n}", f"{self.metrics[f'train_{n}']:.4f}", "") for n in names]
        heldout = self.heldout
        if heldout is None:
            metric_names = [n for n in (*names, "perplexity") if f"eval_{n}" in self.metrics]
            rows += [
                (f"held-out {n}", f"{self.metrics[f'eval_{n}']:.4f}", "") for n in metric_names
            ]
        rows += [
            (f"held-out {label}", f"{self.metrics[f'eval_{name}']:.1%}", "")
            for name, label in _ERROR_RATES.items()
            if f"eval_{name}" in self.metrics
        ]
        if heldout is not None:
            of = f"nats per token, over {heldout.tokens:,} held-out tokens"
            rows += [
                ("held-out cross-entropy", f"{heldout.cross_entropy:.4f}", of),
                (
                    "  of the unigram distribution",
                    *_against(heldout.unigram, heldout.cross_entropy),
                ),
                (
                    "  with one token of context",
                    *_against(heldout.one_token, heldout.cross_entropy),
                ),
                ("  bits per byte", f"{heldout.bits_per_byte:.4f}", ""),
            ]
        for task, metrics in self.evaluation.items():
            rows.append((task, "", "on local rows" if task in self.local else "by lm-eval"))
            early = harness.describe_metrics(self.early_evaluation.get(task, {}))
            rows += [
                (f"  {name}", text, f"before training {early[name]}" if name in early else "")
                for name, text in harness.describe_metrics(metrics).items()
            ]
        return rows

    def _compare_answers(self) -> Table:
        """Return a table with the completions before and after training, side by side."""
        from rich.markup import escape
        from rich.table import Table

        samples = [sample for sample in self.samples if sample.before is not None]
        columns = ["prompt", "before training", "after training"]
        has_expected = any(sample.expected is not None for sample in samples)
        table = Table(title="Answers", title_justify="left", show_lines=True)
        for name in [*columns, *(["expected"] if has_expected else [])]:
            table.add_column(name, overflow="fold", ratio=1)
        for sample in samples:
            texts = [_last_text(sample.prompt), sample.before or "", sample.completion]
            texts += [sample.expected or ""] if has_expected else []
            table.add_row(*(escape(_shorten(text)) for text in texts))
        return table

    def _keep(self, directory: Path) -> None:
        """Write `summary.json`, the report, and a run file that serves the model.

        The summary of a run that had finished before keeps its figures, and gets those of new
        evaluations.
        """
        from ed_trainers.report import write_report

        recorded, figures = self._recorded, self._collect_figures()
        for folder in filter(None, (self.model, self.adapter)):
            early = figures["evaluation_before_training"]
            self._complete_card(folder, figures["evaluation"], early)
        figures = json.loads(json.dumps(figures))
        if figures != recorded:
            text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
            (directory / SUMMARY).write_text(text, "utf-8")
            write_report(directory)
        serve = self._get_served_sections()
        if serve and not (recorded and (directory / "serve.yaml").is_file()):
            serve["actions"] = ["serve"]
            (directory / "serve.yaml").write_text(yaml.safe_dump(serve, sort_keys=False), "utf-8")

    def _complete_card(
        self,
        folder: Path,
        evaluation: dict[str, dict[str, float]],
        early: dict[str, dict[str, float]],
    ) -> None:
        """Add the training, its metrics and the evaluation to the card of a model."""
        from ed_models.checkpoints.model_card import add_section

        rows = [f"- {name}: {value:g}" for name, value in self.metrics.items()]
        add_section(folder, "Training", [*self.training, *rows], datasets=self.datasets)
        if evaluation:
            add_section(
                folder,
                "Evaluation",
                [
                    f"- {task}, {name}: {text}{_describe_early(early.get(task, {}), name)}"
                    for task, metrics in evaluation.items()
                    for name, text in harness.describe_metrics(metrics).items()
                ],
            )

    def _get_served_sections(self) -> dict[str, Any]:
        """Return the sections that serve the trained model; empty if the engine cannot."""
        if self.task in _NOT_SERVED:
            return {}
        if self.model is not None:
            return {"model": {"name_or_path": str(self.model)}}
        return {**self.base, "lora": {"name_or_path": str(self.adapter)}} if self.adapter else {}

    def _places(self, directory: Path) -> str:
        lines = ["Files"]
        if self.model is not None:
            lines.append(f"  model (Hugging Face layout)  {self.model}")
        if self.adapter is not None:
            lines.append(f"  adapters (PEFT's layout)     {self.adapter}")
        for label, name in (
            ("report", "report.html"),
            ("metrics", "metrics.jsonl"),
            ("completions and rewards", "completions.jsonl"),
            ("TensorBoard", "tensorboard"),
            ("checkpoints", "checkpoints"),
            ("configuration and versions", "config.yaml"),
            ("this summary", "summary.json"),
            ("run file of the server", "serve.yaml"),
        ):
            if (directory / name).exists():
                lines.append(f"  {label:<29}{directory / name}")
        if self.results is not None:
            lines.append(f"  {'evaluation':<29}{self.results}")
        if self._get_served_sections():
            uv = "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""
            lines += ["Next commands", f"  serve the model:  {uv}elarge {directory / 'serve.yaml'}"]
            if self.task in (*GENERATING, TaskType.AUTO_BIND):
                route, request = self._suggestion()
                lines.append(
                    f"  send a request:   curl -s http://127.0.0.1:11556/v1/{route} "
                    f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(request))}"
                )
        return "\n".join(lines)

    def _suggestion(self) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a request to the model that was trained."""
        if self.question:
            asked = [sample.prompt for sample in self.samples if not isinstance(sample.prompt, str)]
            chats = filter(_is_short_text, (*asked, self.question))
            messages = next(chats, [{"role": "user", "content": "Hello"}])
            return "chat/completions", {"messages": list(messages), "max_tokens": 64}
        return "completions", {"prompt": "The", "max_tokens": 32}


def _is_short_text(chat: Chat) -> bool:
    """Return whether the messages have only texts, and few of them for one line of a shell."""
    texts = [message["content"] for message in chat]
    return all(isinstance(text, str) for text in texts) and len("".join(texts)) <= _REQUEST_LENGTH


def _describe_run(run: RunConfig, data: list[str]) -> dict[str, str]:
    """Return the model, the data, the method and the hardware of a run as texts."""
    import jax

    section = run.written.get("model") or {}
    name = section.get("name_or_path") or (section.get("config") or {}).get("model_type")
    device, count = jax.devices()[0], jax.device_count()
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return {
        "model": str(name).partition("#")[0],
        "data": ", ".join(data),
        "method": f"{run.method} with LoRA" if run.adapters is not None else str(run.method),
        "hardware": f"{count} x {device.device_kind}{cores}",
    }


def _read_summary(path: Path) -> dict[str, Any]:
    """Return a stored summary; empty if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _describe_early(early: dict[str, float], name: str) -> str:
    """Return the value of a metric before training as text; empty if there is none."""
    texts = harness.describe_metrics(early)
    return f" (before training {texts[name]})" if name in texts else ""


def _last_text(prompt: Prompt) -> str:
    """Return a prompt, or the last message of a conversation."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def _against(baseline: float, model_loss: float) -> tuple[str, str]:
    """Return a baseline as text, and the difference between the model and the baseline."""
    difference = baseline - model_loss
    side = "the model is better" if difference > 0 else "the model is worse"
    return f"{baseline:.4f}", f"{side} by {abs(difference):.2f}"
