"""Metrics of a run: one JSON object a line, and TensorBoard derived from it.

`metrics.jsonl` is the record. Rows are flushed to the operating system as they are written and
forced to disk before a checkpoint is; on resuming from step N, rows beyond N are cut off. So after
any crash no step is missing and none is there twice. TensorBoard's event files cannot be cut, and
their writer buffers: they are written again from the record when a run resumes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

Row = Mapping[str, Any]

#: The record's file in the directory of a run.
RECORD = "metrics.jsonl"

# Keys of a row that are not curves.
_NOT_CURVES = ("step", "time")


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


class TensorBoard:
    """Event files under a directory, one scalar for each number of a row."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._writer: SummaryWriter | None = None

    def restart(self, rows: list[Row]) -> None:
        """Write the event file again from the rows."""
        from tensorboardX import SummaryWriter

        shutil.rmtree(self.directory, ignore_errors=True)
        self._writer = SummaryWriter(str(self.directory))
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        """Add the numbers of a row: `train/loss`, `eval/loss`, …"""
        assert self._writer is not None
        group = "eval" if is_evaluation(row) else "train"
        for name, value in row.items():
            if name in _NOT_CURVES or not isinstance(value, int | float):
                continue
            tag = f"{group}/{name.removeprefix('eval_')}"
            self._writer.add_scalar(tag, value, row["step"], walltime=row.get("time"))

    def flush(self) -> None:
        """Hand the events to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricsLog:
    """The metrics of a run, sent to each sink.

    Args:
        path: the record.
        tensorboard: directory of the event files, or None.
        active: False in every process but the first, which alone writes.
    """

    def __init__(self, path: Path, tensorboard: Path | None, *, active: bool):
        self._last: dict[bool, Row] = {}
        self._path = path
        self._sinks: list[Sink] = []
        if active:
            self._sinks.append(JsonLines(path))
            if tensorboard is not None:
                self._sinks.append(TensorBoard(tensorboard))

    def restart(self, step: int) -> None:
        """Go on after a step: rows beyond it are forgotten, for they will come again."""
        rows = [row for row in read_rows(self._path) if row["step"] <= step]
        self._last = {is_evaluation(row): row for row in rows}
        for sink in self._sinks:
            sink.restart(list(rows))

    def write(self, row: Row) -> None:
        """Add a row to every sink."""
        self._last[is_evaluation(row)] = row
        for sink in self._sinks:
            sink.write(row)

    def last(self, *, evaluation: bool) -> Row | None:
        """Return the newest training row, or the newest evaluation row."""
        return self._last.get(evaluation)

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
