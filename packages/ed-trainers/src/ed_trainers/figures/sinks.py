"""Further destinations of metrics: TensorBoard, and the trackers of `report_to`.

A destination receives the rows of the record from a thread (`Buffered`), so a slow destination does
not delay the steps.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ed_trainers.figures.metrics import MetricRow, Sink, curves, histograms
from ed_trainers.figures.trackers import TRACKERS, About
from ed_trainers.options.base import TrainingArguments

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

#: Folder of a run with its event files.
TENSORBOARD = "tensorboard"
# Seconds between two deliveries of the thread.
_INTERVAL = 2.0


class Buffered:
    """A destination that receives its rows from another thread, some seconds late.

    If the destination fails, a message is printed and the destination is closed; the record still
    has its rows.

    Args:
        sink: receives rows in order.
        say: prints a message.
    """

    def __init__(self, sink: Sink, say: Callable[[str], None]):
        self._sink = sink
        self._say = say
        self._rows: deque[MetricRow] = deque()  # one thread appends, the other removes
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None

    def restart(self, rows: list[MetricRow]) -> None:
        """Start, with exactly these rows; errors are raised in the caller's thread."""
        self._sink.restart(rows)
        self._thread = threading.Thread(target=self._feed, name="metrics", daemon=True)
        self._thread.start()

    def write(self, row: MetricRow) -> None:
        """Pass a row to the thread."""
        self._rows.append(row)

    def flush(self) -> None:
        """Deliver every row now."""
        self._pass_on(self._sink.flush)

    def close(self) -> None:
        """Deliver every row, and close the destination."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._pass_on(self._sink.close)

    def _feed(self) -> None:
        while not self._closing.wait(_INTERVAL):
            self._pass_on(self._sink.flush)

    def _pass_on(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._failed:
                self._rows.clear()
                return
            try:
                while self._rows:
                    self._sink.write(self._rows.popleft())
                callback()
            except Exception as error:  # training continues without the tracker
                self._failed = True
                name = type(self._sink).__name__
                self._say(f"{name} gets no more metrics ({error}); they are in metrics.jsonl")


class TensorBoard:
    """Event files in a directory, one event per row: `train/loss`, `eval/loss`, …"""

    def __init__(self, directory: Path):
        self.directory = directory
        self._writer: EventsWriter | None = None

    def restart(self, rows: list[MetricRow]) -> None:
        """Write the event file again from the rows."""
        from tensorboardX.event_file_writer import EventsWriter

        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._writer = EventsWriter(str(self.directory / "events"))
        for row in rows:
            self.write(row)

    def write(self, row: MetricRow) -> None:
        """Add the numbers of a row as one event."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import (
            HistogramProto,  # pyright: ignore[reportAttributeAccessIssue]
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        assert self._writer is not None
        values = [Summary.Value(tag=tag, simple_value=x) for tag, x in curves(row).items()]
        for tag, (counts, edges) in histograms(row).items():
            middles = [(a + b) / 2 for a, b in pairwise(edges)]
            pairs = list(zip(counts, middles, strict=True))
            histogram = HistogramProto(
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(count * x for count, x in pairs),
                sum_squares=sum(count * x * x for count, x in pairs),
                bucket_limit=edges[1:],
                bucket=counts,
            )
            values.append(Summary.Value(tag=tag, histo=histogram))
        when = row.get("time") or time.time()
        event = Event(step=row["step"], wall_time=when, summary=Summary(value=values))
        self._writer.write_event(event)

    def flush(self) -> None:
        """Flush the events to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def build_sinks(arguments: TrainingArguments, say: Callable[[str], None]) -> list[Sink]:
    """Return the destinations that the arguments name, each with a thread.

    Raises:
        ConfigError: the module of a tracker is not installed.
    """
    directory = Path(arguments.save_directory)
    sinks: list[Sink] = []
    if arguments.use_tensorboard:
        sinks.append(TensorBoard(directory / TENSORBOARD))
    for name in arguments.report_to:
        run_name = arguments.run_name or directory.absolute().name
        settings = arguments.model_dump(mode="json")
        about = About(
            arguments.project,
            run_name,
            settings,
            arguments.tracker_entity,
            arguments.generation_log_to_wandb,
        )
        sinks.append(TRACKERS[name](directory, about))
    return [Buffered(sink, say) for sink in sinks]
