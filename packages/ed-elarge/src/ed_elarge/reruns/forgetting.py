"""`elarge forget`: the model of a run without some rows, from the last checkpoint before them.

A run without rows is the same run whose run file has `mixture.exclude`: each excluded document
keeps its place in the order and in its packed row, but no batch contains its tokens. All batches
before the first one with such a place are those of the first run, so the run that starts at a
checkpoint before that batch equals a run from the start, to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ed_data.rows.exclusion import read_hashes
from ed_data.rows.selection import SelectedRow, select_rows
from ed_infra.errors import ConfigError

from ed_elarge.reruns.finished_run import (
    TOKENIZER,
    FinishedRun,
    claim_directory,
    warn_of_machine,
    write_record,
)

#: The record of forgotten rows, in the directory of the new run; also its `mixture.exclude`.
FORGOTTEN = "forgotten.json"


@dataclass(frozen=True)
class ForgetPlan:
    """The cost of a replay.

    Attributes:
        parent: the run.
        rows: the documents to forget.
        steps: hash of a document -> its updates of the run, from 1.
        checkpoint: number of updates of the state from which the replay starts; 0: the start.
    """

    parent: FinishedRun
    rows: Sequence[SelectedRow]
    steps: dict[str, list[int]]
    checkpoint: int

    @property
    def first_step(self) -> int | None:
        """The first update that used one of the rows; None if none did."""
        return min((used[0] for used in self.steps.values() if used), default=None)

    @property
    def replayed_steps(self) -> int:
        """Number of updates of the replay."""
        return 0 if self.first_step is None else self.parent.total_steps - self.checkpoint

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        rows = [
            {"hash": row.hash, "inform": row.inform, "row": row.row, "steps": self.steps[row.hash]}
            for row in self.rows
        ]
        return {
            "run": str(self.parent.directory),
            "rows": rows,
            "first_step": self.first_step,
            "checkpoint": self.checkpoint,
            "replayed_steps": self.replayed_steps,
            "total_steps": self.parent.total_steps,
            "step_seconds": self.parent.step_seconds,
            "predicted_seconds": self.parent.predict_seconds(self.replayed_steps),
        }

    def describe(self) -> list[str]:
        """Return lines for a person."""
        if self.first_step is None:
            return [f"{len(self.rows)} documents: no step of the run has used them"]
        start = f"checkpoint {self.checkpoint}" if self.checkpoint else "the start"
        seconds = self.parent.predict_seconds(self.replayed_steps)
        cost = "an unknown time" if seconds is None else f"about {seconds:,.0f} s"
        uses = sum(len(used) for used in self.steps.values())
        return [
            f"{len(self.rows)} documents, used in {uses} steps, first in step {self.first_step:,}",
            f"replay from {start}: {self.replayed_steps:,} of {self.parent.total_steps:,} steps, "
            f"{cost}",
        ]


def plan_forgetting(parent: FinishedRun, selections: Sequence[str]) -> ForgetPlan:
    """Find the rows, the steps that used them, and the checkpoint before these steps.

    Args:
        parent: the run.
        selections: texts of `--rows`; see `ed_data.rows.selection.RowSelector.parse`.

    Raises:
        ConfigError: the run cannot be replayed.
        DataError: no row is selected.
    """
    from ed_data.batches.loader import Loader

    from ed_elarge.model import eLargeModel

    parent.refuse("forget", samples=False)
    mixture = parent.run.mixture
    assert mixture is not None, "`FinishedRun.read` checks the section"
    rows = select_rows(mixture, selections, schema=parent.run.schema)
    if mixture.exclude is not None:
        known = {f"{int(one):016x}" for one in read_hashes(mixture.exclude)}
        rows = [row for row in rows if row.hash not in known]
    if not rows:
        raise ConfigError(f"{parent.directory} was trained without these rows: nothing is left")
    loader = eLargeModel.from_run(parent.run).build_dataset()
    assert isinstance(loader, Loader), "`refuse` checks that the data is not streamed"
    try:
        found = loader.find_steps([row.hash for row in rows], parent.total_steps)
    finally:
        loader.close()
    steps = {name: [step + 1 for step in used] for name, used in found.items()}
    first = min((used[0] for used in steps.values() if used), default=None)
    checkpoint = 0 if first is None else parent.find_checkpoint(first - 1)
    return ForgetPlan(parent, rows, steps, checkpoint)


def forget_rows(plan: ForgetPlan, target: Path, *, keep_tokenizer: bool) -> dict[str, Any]:
    """Replay a run without rows, and return its record.

    Args:
        plan: the rows and the checkpoint.
        target: directory of the new run.
        keep_tokenizer: whether a tokenizer that was trained on the rows is used further.

    Raises:
        ConfigError: the run has trained its tokenizer on the rows, or the directory has other
            files.
    """
    from ed_elarge.actions.execution import execute

    parent, began = plan.parent, time.monotonic()
    values: dict[str, Any] = {"mixture.exclude": str(target / FORGOTTEN)}
    section = parent.run.model.tokenizer_section if parent.run.model is not None else None
    trained = section is not None and section.train is not None
    if trained and not keep_tokenizer:
        raise ConfigError(
            f"the tokenizer of {parent.directory} was trained on the rows, and another tokenizer "
            "changes every step: pass --keep-tokenizer to keep it, which its merges of frequent "
            "texts may reveal, or train again from a run file with mixture.exclude"
        )
    if section is not None and trained:
        template = {} if section.chat_template is None else {"chat_template": section.chat_template}
        values["model.tokenizer"] = {"name_or_path": str(target / TOKENIZER), **template}
    record = plan.to_dict()
    record["rows"] += [{"hash": one} for one in list_earlier_hashes(parent)]
    record["keeps_tokenizer"] = trained
    identity = {key: record[key] for key in ("run", "rows", "checkpoint")}
    if not claim_directory(target, FORGOTTEN, identity):
        parent.copy_start(target, plan.checkpoint)
        write_record(target / FORGOTTEN, record)
    record["machine_differences"] = warn_of_machine(parent)
    result = execute(parent.change(target, values))
    record |= {"seconds": time.monotonic() - began, "complete": result.code == 0}
    record["model"] = next((n for n in ("model", "adapter") if (target / n).is_dir()), None)
    write_record(target / FORGOTTEN, record)
    return record


def list_earlier_hashes(parent: FinishedRun) -> list[str]:
    """Return the hashes of the rows that the run itself had excluded."""
    mixture = parent.run.mixture
    if mixture is None or mixture.exclude is None:
        return []
    return [f"{int(one):016x}" for one in read_hashes(mixture.exclude)]
