"""Metrics of a run: one JSON object per line, and their destinations (`figures.sinks`).

`metrics.jsonl` is the record. Each row is flushed to the operating system when it is written, and
to the disk before each checkpoint. A run that resumes from step N removes the rows after N.
Therefore no step is missing or repeated after any crash. Rows wait in memory while the disk is
full. TensorBoard's event files cannot be truncated, and their writer is delayed, so a resumed run
writes them again from the record.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from ed_infra.errors import CheckpointError

from ed_trainers.stored import disk

MetricRow = Mapping[str, Any]
Say = Callable[[str], None]

#: Name of the record in the directory of a run.
RECORD = "metrics.jsonl"
#: Name of the file with completions and their rewards, for methods that sample.
COMPLETIONS = "completions.jsonl"

# Keys of a row that are not curves.
_NOT_CURVES = ("step", "time")
#: Metrics of a row that depend on the clock or the machine: equal runs have different values.
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
    """A destination of metrics."""

    def restart(self, rows: list[MetricRow]) -> None:
        """Start, with exactly these rows."""
        ...

    def write(self, row: MetricRow) -> None:
        """Add a row."""
        ...

    def flush(self) -> None:
        """Make the written rows survive this process."""
        ...

    def close(self) -> None:
        """Close the destination."""
        ...


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; an incomplete last line is ignored."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def is_evaluation(row: MetricRow) -> bool:
    """Return whether a row belongs to an evaluation, not to a training step."""
    return "eval_loss" in row


def curves(row: MetricRow) -> dict[str, float]:
    """Return the numbers of a row by the names of their curves: `train/loss`, `eval/loss`, …

    Metrics of benchmarks and watchers keep their names, `benchmark/<task>/<metric>`; they are in
    rows of their own.
    """
    group = "eval/" if is_evaluation(row) else "train/"
    own_names = "loss" not in row and not is_evaluation(row)
    return {
        name if own_names and "/" in name else group + name.removeprefix("eval_"): value
        for name, value in row.items()
        if name not in _NOT_CURVES and isinstance(value, int | float)
    }


def histograms(row: MetricRow) -> dict[str, tuple[list[float], list[float]]]:
    """Return the counts and the edges of the histograms of a row, by their names."""
    return {
        name: (value["counts"], value["edges"])
        for name, value in row.items()
        if isinstance(value, Mapping) and value.keys() == {"counts", "edges"}
    }


class JsonLines:
    """The record, `metrics.jsonl`.

    If the disk is full, rows wait in memory, at most `WAITING` bytes, and are written as soon as
    there is space.

    Args:
        path: the file.
        say: prints a message.
    """

    WAITING = 1 << 24

    def __init__(self, path: Path, say: Say = print):
        self.path = path
        self._say = say
        self._file: FileIO | None = None
        self._waiting = b""
        self._full = False

    @property
    def is_open(self) -> bool:
        """Whether rows can be written."""
        return self._file is not None

    def restart(self, rows: list[MetricRow]) -> None:
        """Replace the file atomically by a file with exactly these rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".jsonl.new")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = FileIO(self.path, "a")  # an incomplete row is detected

    def write(self, row: MetricRow) -> None:
        """Add a row; it survives a kill of this process, and after `flush` a crash of the
        machine."""
        line = _line(row).encode()
        if len(self._waiting) + len(line) <= self.WAITING:
            self._waiting += line
        self._write()

    def flush(self) -> None:
        """Force the rows to disk."""
        self._write(sync=True)

    def close(self) -> None:
        """Force the rows to disk and close the file."""
        if self._file is None:
            return
        self.flush()
        if self._waiting:
            lost = self._waiting.count(b"\n")
            self._say(f"the last {lost} rows of {self.path} could not be written")
        self._file.close()
        self._file = None

    def _write(self, *, sync: bool = False) -> None:
        if self._file is None:
            return
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            if sync:
                os.fsync(self._file.fileno())
            self._full = False
        except OSError as error:
            if not disk.is_full(error):
                raise
            if not self._full:
                room = disk.room(self.path.parent, len(self._waiting))
                self._say(f"rows of {self.path.name} wait until they can be written: {room}")
            self._full = True


class MetricsLog:
    """The metrics of a run, sent to each destination.

    Args:
        path: the record.
        other_sinks: further destinations; only used if `active`.
        active: False in every process except the first, which writes.
        say: prints a message.
    """

    def __init__(
        self, path: Path, other_sinks: Iterable[Sink] = (), *, active: bool, say: Say = print
    ):
        self._last: dict[bool, MetricRow] = {}
        self._evaluations: dict[int, MetricRow] = {}
        self._path = path
        self._sinks: list[Sink] = []
        self._samples = JsonLines(path.with_name(COMPLETIONS), say)
        self._generation: object = None  # the newest of the file
        if active:
            self._sinks = [JsonLines(path, say), *other_sinks]

    def restart(self, step: int) -> None:
        """Continue after a step: later rows are removed, because their steps run again.

        Raises:
            CheckpointError: the disk is full; the files stay unchanged.
        """
        rows = [row for row in read_metrics(self._path) if row["step"] <= step]
        self._last, self._evaluations = {}, {}
        for row in rows:
            self._note(row)
        samples = [row for row in read_metrics(self._samples.path) if row["step"] <= step]
        self._generation = samples[-1]["generation"] if samples else None
        try:
            for sink in self._sinks:
                sink.restart(list(rows))
            if self._sinks and self._samples.path.exists():
                self._samples.restart(list(samples))
        except OSError as error:
            if not disk.is_full(error):
                raise
            room = disk.room(self._path.parent, sum(len(_line(row)) for row in rows))
            raise CheckpointError(f"{self._path} could not be written: {room}") from error

    def write(self, row: MetricRow) -> None:
        """Add a row to every destination."""
        self._note(row)
        for sink in self._sinks:
            sink.write(row)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> bool:
        """Add completions of a generation to `completions.jsonl`, unless the file has them.

        Args:
            step: the step that trains on the generation.
            samples: see `Completions.to_samples`.

        Returns:
            Whether they are new.
        """
        if not samples or samples[0]["generation"] == self._generation:
            return False
        self._generation = samples[0]["generation"]
        if self._sinks:
            if not self._samples.is_open:
                self._samples.restart([])
            for sample in samples:
                self._samples.write({"step": step, **sample})
        return True

    def _note(self, row: MetricRow) -> None:
        """Store the newest rows of steps and of evaluations."""
        if is_evaluation(row):
            self._evaluations[row["step"]] = row
        if is_evaluation(row) or "loss" in row:
            self._last[is_evaluation(row)] = row

    def last(self, *, evaluation: bool) -> MetricRow | None:
        """Return the newest training row, or the newest evaluation row."""
        return self._last.get(evaluation)

    def evaluation(self, step: int) -> MetricRow | None:
        """Return the evaluation row of a step, or None."""
        return self._evaluations.get(step)

    def flush(self) -> None:
        """Make every row survive a crash; called before each checkpoint."""
        for sink in (*self._sinks, self._samples):
            sink.flush()

    def close(self) -> None:
        """Close every destination."""
        for sink in (*self._sinks, self._samples):
            sink.close()


def _line(row: MetricRow) -> str:
    # The repr of a float32 that was converted to float64 is exact. JSON has no NaN: null.
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(clean) + "\n"
