"""`elarge branch`: a run that continues from a step of another run, with changed values.

The steps before the branch are those of the parent: a checkpoint of the step, or a replay from the
checkpoint before it. A value may change if the parent's state is also a state of the changed run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError
from ed_trainers.callbacks import Callback
from ed_trainers.checkpoints.run_record import MUST_MATCH
from ed_trainers.figures.metrics import CLOCKED, RECORD, read_metrics
from ed_trainers.report.comparison import BRANCH, PARENT_METRICS

from ed_elarge.config.layers import flatten_values
from ed_elarge.config.run_config import RunConfig
from ed_elarge.reruns.finished_run import (
    FinishedRun,
    claim_directory,
    warn_of_machine,
    write_record,
)
from ed_elarge.reruns.stored_samples import SampleScorer, StoredSample, list_samples

if TYPE_CHECKING:
    from ed_trainers.callbacks import RunningTrainer
    from transformers import PreTrainedTokenizerBase

#: Keys that a branch may change: of the trainer, of evaluations, and of reading data.
_FREE = (
    *("trainer.", "eval.", "esurge.", "training_engine.", "actions"),
    *("mixture.prefetch_workers", "mixture.prefetch_buffer_size", "mixture.exclude"),
)
#: Keys of the trainer whose change makes another run before the branch.
_PAST = (
    *MUST_MATCH,
    *("ema_decay", "step_start_point", "force_step_start_point", "param_dtype", "max_length"),
    *("save_directory", "resume_if_possible", "quantization_mode", "quantization_bits"),
    *("quantization_group_size", "precompute_ref_log_probs"),
)


@dataclass(frozen=True)
class BranchPlan:
    """A branch before it runs.

    Attributes:
        parent: the run.
        step: number of updates at which the branch begins.
        checkpoint: number of updates of the state from which the replay starts; 0: the start.
        changes: changed key -> its values in the parent and in the branch.
    """

    parent: FinishedRun
    step: int
    checkpoint: int
    changes: Mapping[str, tuple[Any, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "run": str(self.parent.directory),
            "step": self.step,
            "checkpoint": self.checkpoint,
            "replayed_steps": self.step - self.checkpoint,
            "changes": {key: list(values) for key, values in self.changes.items()},
            "predicted_seconds": self.parent.predict_seconds(
                self.parent.total_steps - self.checkpoint
            ),
        }

    def describe(self) -> list[str]:
        """Return lines for a person."""
        start = f"checkpoint {self.checkpoint}" if self.checkpoint else "the start"
        replay = f"replay of {self.step - self.checkpoint:,} steps from {start}"
        begin = start if self.step == self.checkpoint else replay
        changed = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in self.changes.items()]
        return [f"branch at step {self.step:,}, {begin}", *(changed or ["no value changes"])]


def plan_branch(
    parent: FinishedRun, step: int, target: Path, settings: Sequence[str]
) -> tuple[BranchPlan, RunConfig]:
    """Check a branch, and return it with its run.

    Args:
        parent: the run.
        step: number of updates at which the branch begins.
        target: directory of the branch.
        settings: texts of `--set`.

    Raises:
        ConfigError: the step does not exist, or a key would change the steps before it.
    """
    parent.refuse("branch", samples=True)
    if not 0 < step < parent.total_steps:
        raise ConfigError(
            f"--at {step} is no step inside of the run: choose 1 to {parent.total_steps - 1} "
            "(for other values from the first step on, start a new run)"
        )
    same, run = parent.change(target, {}), parent.change(target, {}, settings)
    changes = compare_values(same, run)
    for key in changes:
        problem = find_problem(key)
        if problem:
            raise ConfigError(f"--set {key}: {problem}")
    trainer = run.trainer
    assert trainer is not None, "`change` keeps the section"
    if trainer.max_training_steps is not None and trainer.max_training_steps <= step:
        raise ConfigError(
            f"max_training_steps {trainer.max_training_steps} ends before the branch at step "
            f"{step} has a step: raise it"
        )
    return BranchPlan(parent, step, parent.find_checkpoint(step), changes), run


def compare_values(first: RunConfig, second: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return key -> values of two runs where they differ, derived values included."""
    one, other = flatten_values(first.to_dict()), flatten_values(second.to_dict())
    keys = dict.fromkeys([*one, *other])
    return {k: (one.get(k), other.get(k)) for k in keys if one.get(k) != other.get(k)}


def find_problem(key: str) -> str | None:
    """Return why a key cannot change in a branch; None if it can."""
    section, _, name = key.partition(".")
    if key.startswith(_FREE) and not (section == "trainer" and name.split(".")[0] in _PAST):
        return None
    if name in ("save_directory", "resume_if_possible"):
        return "pass the directory of the branch as --output"
    return (
        "this key determines the steps before the branch, which are those of the parent: keep its "
        "value, or start a new run from the weights of the step (python -m ed_trainers.convert "
        "RUN/checkpoints/STEP MODEL, and model.name_or_path: MODEL)"
    )


@dataclass
class BranchPoint(Callback):
    """Evaluates the held-out data and the stored samples at the branch and at its end."""

    samples: Sequence[StoredSample]
    tokenizer: PreTrainedTokenizerBase | None
    has_held_out: bool
    metrics: dict[str, float] = field(default_factory=dict)
    scores: list[dict[str, Any]] = field(default_factory=list)

    def on_train_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Evaluate the state at the branch."""
        if self.has_held_out:
            metrics = trainer.evaluate()
            self.metrics = {n: x for n, x in metrics.items() if n not in CLOCKED}
        self._score(trainer, "at_branch")

    def on_train_end(self, trainer: RunningTrainer, step: int) -> None:
        """Score the samples by the trained model."""
        self._score(trainer, "at_end")

    def _score(self, trainer: RunningTrainer, name: str) -> None:
        if not self.samples or self.tokenizer is None:
            return
        values = SampleScorer(self.tokenizer)(trainer.model, self.samples)
        self.scores = self.scores or [sample.to_dict() for sample in self.samples]
        for row, value in zip(self.scores, values, strict=True):
            row[name] = value


def run_branch(plan: BranchPlan, run: RunConfig, target: Path) -> dict[str, Any]:
    """Replay up to the branch, continue with the changed values, and return the record.

    Raises:
        ConfigError: the directory has other files, or the replay differs from the parent.
    """
    from ed_elarge.actions.execution import execute
    from ed_elarge.model import eLargeModel

    parent, record = plan.parent, plan.to_dict()
    identity = {key: record[key] for key in ("run", "step", "changes")}
    if not claim_directory(target, BRANCH, identity):
        parent.copy_start(target, plan.checkpoint)
        shutil.copyfile(parent.directory / RECORD, target / PARENT_METRICS)
        write_record(target / BRANCH, record)
    record["machine_differences"] = warn_of_machine(parent)
    if not (target / "checkpoints" / str(plan.step)).is_dir():
        print(f"replaying steps {plan.checkpoint + 1} to {plan.step} of {parent.directory}")
        execute(parent.change(target, {}), until=plan.step)
    record["replay_differences"] = list(compare_replay(parent, target, plan))
    for line in record["replay_differences"]:
        print(f"warning: the replay differs from the run: {line}")
    elm = eLargeModel.from_run(run)
    point = BranchPoint(
        list_samples(parent.directory) if run.has_text else (),
        elm.build_tokenizer() if run.has_text else None,
        run.has_held_out,
    )
    result = execute(run, watchers=[point])
    record |= {"evaluation": point.metrics, "samples": point.scores}
    record["complete"] = result.code == 0
    write_record(target / BRANCH, record)
    from ed_trainers.report import write_report

    record["report"] = str(write_report(target))
    return record


def compare_replay(parent: FinishedRun, target: Path, plan: BranchPlan) -> Iterator[str]:
    """Yield the figures of the replayed steps that differ from those of the parent."""
    first, second = (
        {row["step"]: row for row in read_metrics(folder / RECORD) if "loss" in row}
        for folder in (parent.directory, target)
    )
    for step in sorted(first.keys() & second.keys()):
        if not plan.checkpoint < step <= plan.step:
            continue
        for name in ("loss", "grad_norm"):
            values = first[step].get(name), second[step].get(name)
            if values[0] != values[1]:
                yield f"{name} of step {step}: {values[0]} then, {values[1]} now"
                return
