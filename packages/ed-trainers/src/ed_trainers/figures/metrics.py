"""Metrics of a run: one JSON object a line, and what is made of it (`figures.sinks`).

`metrics.jsonl` is the record. Rows are flushed to the operating system as they are written and
forced to disk before a checkpoint is; on resuming from step N, rows beyond N are cut off. So after
any crash no step is missing and none is there twice. TensorBoard's event files cannot be cut, and
their writer is late: they are written again from the record when a run resumes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

Row = Mapping[str, Any]

#: The record's file in the directory of a run.
RECORD = "metrics.jsonl"

# Keys of a row that are not curves.
_NOT_CURVES = ("step", "time")
#: Figures of a row that a clock or the machine says: two equal runs differ in them.
CLOCKED = (
    "time",
    "tokens_per_second",
    "mfu",
    "data_wait",
    "goodput",
    "peak_memory_gib",
    "eval_seconds",
    "rollout_seconds",
    "rollout_tokens_per_second",
)


class Sink(Protocol):
    """A place that metrics go to."""

    def restart(self, rows: list[Row]) -> None:
        """Begin, holding exactly these rows."""
        ...

    def write(self, row: Row) -> None:
        """Add a row."""
        ...

    def flush(self) -> None:
        """Make what was written survive this process."""
        ...

    def close(self) -> None:
        """End."""
        ...


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; a last line that was not finished is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def is_evaluation(row: Row) -> bool:
    """Tell an evaluation's row from a training step's."""
    return "eval_loss" in row


def curves(row: Row) -> dict[str, float]:
    """Return the numbers of a row by the names of their curves: `train/loss`, `eval/loss`, …"""
    group = "eval" if is_evaluation(row) else "train"
    return {
        f"{group}/{name.removeprefix('eval_')}": value
        for name, value in row.items()
        if name not in _NOT_CURVES and isinstance(value, int | float)
    }


class JsonLines:
    """The record, `metrics.jsonl`."""

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO | None = None

    def restart(self, rows: list[Row]) -> None:
        """Replace the file, atomically, by one that holds exactly these rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".jsonl.new")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Add a row; it survives a kill of this process at once, of the machine after `flush`."""
        assert self._file is not None
        self._file.write(_line(row))
        self._file.flush()

    def flush(self) -> None:
        """Force the rows to disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Force the rows to disk and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


class MetricsLog:
    """The metrics of a run, sent to each sink.

    Args:
        path: the record.
        others: sinks beside it; only where `active`.
        active: False in every process but the first, which alone writes.
    """

    def __init__(self, path: Path, others: Iterable[Sink] = (), *, active: bool):
        self._last: dict[bool, Row] = {}
        self._evaluations: dict[int, Row] = {}
        self._path = path
        self._sinks: list[Sink] = []
        if active:
            self._sinks = [JsonLines(path), *others]

    def restart(self, step: int) -> None:
        """Go on after a step: rows beyond it are forgotten, for they will come again."""
        rows = [row for row in read_rows(self._path) if row["step"] <= step]
        self._last = {is_evaluation(row): row for row in rows}
        self._evaluations = {row["step"]: row for row in rows if is_evaluation(row)}
        for sink in self._sinks:
            sink.restart(list(rows))

    def write(self, row: Row) -> None:
        """Add a row to every sink."""
        self._last[is_evaluation(row)] = row
        if is_evaluation(row):
            self._evaluations[row["step"]] = row
        for sink in self._sinks:
            sink.write(row)

    def last(self, *, evaluation: bool) -> Row | None:
        """Return the newest training row, or the newest evaluation row."""
        return self._last.get(evaluation)

    def evaluation(self, step: int) -> Row | None:
        """Return the row of the evaluation after a step, if there was one."""
        return self._evaluations.get(step)

    def flush(self) -> None:
        """Make every row survive; called before each checkpoint is written."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def _line(row: Row) -> str:
    # repr of a float32 that was widened to float64 names it exactly. NaN is no JSON: null.
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(clean) + "\n"
