"""Where metrics go beside the record: TensorBoard, and the trackers of `report_to`.

Each of them is derived from the record, and fed by a thread (`Buffered`): a step hands a row over
and goes on, however slow the other side is.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ed_trainers.figures.metrics import Row, Sink, curves
from ed_trainers.figures.trackers import TRACKERS, About
from ed_trainers.options.base import TrainingArguments

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

#: Folder of a run that holds its event files.
TENSORBOARD = "tensorboard"
# Seconds between two visits of the thread that feeds a sink.
_INTERVAL = 2.0


class Buffered:
    """A sink that another thread feeds, some seconds late.

    A sink that fails is let go of, with a message: what it holds is in the record too.

    Args:
        sink: gets rows in their order.
        say: prints a message.
    """

    def __init__(self, sink: Sink, say: Callable[[str], None]):
        self._sink = sink
        self._say = say
        self._rows: deque[Row] = deque()  # one thread appends, another takes
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None

    def restart(self, rows: list[Row]) -> None:
        """Begin, holding exactly these rows; errors here are the caller's."""
        self._sink.restart(rows)
        self._thread = threading.Thread(target=self._feed, name="metrics", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Hand a row over."""
        self._rows.append(row)

    def flush(self) -> None:
        """Let the sink have every row now."""
        self._pass_on(self._sink.flush)

    def close(self) -> None:
        """Let the sink have every row, and end it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._pass_on(self._sink.close)

    def _feed(self) -> None:
        while not self._closing.wait(_INTERVAL):
            self._pass_on(self._sink.flush)

    def _pass_on(self, then: Callable[[], None]) -> None:
        with self._lock:
            if self._failed:
                self._rows.clear()
                return
            try:
                while self._rows:
                    self._sink.write(self._rows.popleft())
                then()
            except Exception as error:  # a tracker's own kind: training goes on without it
                self._failed = True
                name = type(self._sink).__name__
                self._say(f"{name} gets no more metrics ({error}); they are in metrics.jsonl")


class TensorBoard:
    """Event files under a directory, one event a row: `train/loss`, `eval/loss`, …"""

    def __init__(self, directory: Path):
        self.directory = directory
        self._writer: EventsWriter | None = None

    def restart(self, rows: list[Row]) -> None:
        """Write the event file again from the rows."""
        from tensorboardX.event_file_writer import EventsWriter

        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._writer = EventsWriter(str(self.directory / "events"))
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        """Add the numbers of a row, as one event."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        assert self._writer is not None
        values = [Summary.Value(tag=tag, simple_value=x) for tag, x in curves(row).items()]
        when = row.get("time") or time.time()
        event = Event(step=row["step"], wall_time=when, summary=Summary(value=values))
        self._writer.write_event(event)

    def flush(self) -> None:
        """Hand the events to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def sinks_of(arguments: TrainingArguments, say: Callable[[str], None]) -> list[Sink]:
    """Return the sinks that the arguments name, each fed by a thread.

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
        about = About(arguments.project, run_name, settings)
        sinks.append(TRACKERS[name](directory, about))
    return [Buffered(sink, say) for sink in sinks]
