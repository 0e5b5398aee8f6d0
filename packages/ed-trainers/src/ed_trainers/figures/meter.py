"""Speed and time of a run: tokens, MFU, waiting, memory, goodput, and a trace of some steps.

jax's profiler writes the trace; Perfetto, XProf and TensorBoard show it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax

from ed_trainers.figures.flops import Utilization
from ed_trainers.options.base import TrainingArguments

#: Activities of a run other than steps. `restart` is the time before the first step: creating the
#: state, or reading it from a checkpoint. `lost` is the time between a checkpoint and the start of
#: the process that continues from it, unless the run was stopped.
Spent = Literal["compile", "data", "checkpoint", "evaluation", "restart", "lost"]
ACTIVITIES: tuple[Spent, ...] = ("compile", "data", "checkpoint", "evaluation", "restart", "lost")

_GIB = 2.0**30


class Meter:
    """Counts tokens and seconds of a run on the host, without waiting for a device.

    Attributes:
        utilization: converts tokens per second to MFU; None if the peak is unknown.
    """

    def __init__(self) -> None:
        self.utilization: Utilization | None = None
        self._began = time.monotonic()
        self._earlier = 0.0  # seconds of the run before this process
        self._earlier_steps = 0.0  # and those of them in steps
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._clock: float | None = None  # end of the last step; None after a compilation
        self._window = [0.0, 0.0]  # tokens and seconds since the last row
        self._whole = [0.0, 0.0]  # and since the start
        self._waited, self._steps = 0.0, 0  # waiting for data, since the last row

    def ready(self) -> None:
        """Record the end of all work before the first step."""
        self._spent["restart"] += time.monotonic() - self._began

    def get_checkpoint_values(self, *, stopped: bool) -> dict[str, Any]:
        """Return the seconds of the run so far, as JSON values for a checkpoint.

        Args:
            stopped: whether the run ends after this checkpoint on request.
        """
        return {"seconds": self.seconds(), "time": time.time(), "stopped": stopped}

    def resume(self, saved: Mapping[str, Any] | None, *, same_launch: bool = False) -> None:
        """Add the seconds of the run before this process.

        Args:
            saved: result of `get_checkpoint_values` in the checkpoint; None if the checkpoint has
                none.
            same_launch: whether a launch that still runs has stopped the run, so that the time
                since the checkpoint is lost.
        """
        if saved is None:
            return
        seconds = saved["seconds"]
        self._earlier_steps = seconds.get("productive", 0.0)
        for kind in ACTIVITIES:
            self._spent[kind] += seconds.get(kind, 0.0)
        self._earlier += sum(seconds.values())
        if same_launch or not saved["stopped"]:
            began = time.time() - (time.monotonic() - self._began)
            lost = max(began - saved["time"], 0.0)
            self._spent["lost"] += lost
            self._earlier += lost

    def get_earlier_step_seconds(self, steps: int) -> float | None:
        """Return the mean seconds of the `steps` steps before this process; None if unknown."""
        return self._earlier_steps / steps if steps and self._earlier_steps else None

    @contextmanager
    def spending(self, kind: Spent) -> Iterator[None]:
        """Record the seconds of the block as an activity other than steps."""
        began = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            self._spent[kind] += now - began
            if kind == "compile":
                self._clock = None  # a step was computed meanwhile, with unknown seconds
            elif self._clock is not None:
                self._clock = now

    @contextmanager
    def fetching(self, idle: Callable[[], bool]) -> Iterator[None]:
        """Record the seconds of the block as waiting for data, if the devices became idle.

        Args:
            idle: returns, after the block, whether the devices have no work left.
        """
        began = time.monotonic()
        yield
        if idle():
            waited = time.monotonic() - began
            self._spent["data"] += waited
            self._waited += waited

    def record_step(self, tokens: int) -> None:
        """Record the end of a step with this number of tokens."""
        now = time.monotonic()
        self._steps += 1
        if self._clock is not None:
            for sums in (self._window, self._whole):
                sums[0] += tokens
                sums[1] += now - self._clock
        self._clock = now

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second since the last row; None if a step was compiled and none followed."""
        return self._window[0] / self._window[1] if self._window[1] else None

    def row(self) -> dict[str, float]:
        """Return the metrics since the last row, and reset them.

        `tokens_per_second`; `mfu`, a share; `data_wait`, seconds per step; `goodput`, the share of
        all seconds that steps used; `peak_memory_gib` of the fullest device.
        """
        rate = self.tokens_per_second
        row = {} if rate is None else {"tokens_per_second": rate}
        if rate is not None and self.utilization is not None:
            row["mfu"] = self.utilization.of(rate)
        row["data_wait"] = self._waited / max(self._steps, 1)
        row["goodput"] = self.seconds()["productive"] / self._get_elapsed_seconds()
        memory = peak_memory()
        if memory is not None:
            row["peak_memory_gib"] = memory / _GIB
        self._window, self._waited, self._steps = [0.0, 0.0], 0.0, 0
        return row

    def seconds(self) -> dict[str, float]:
        """Seconds by activity; `productive` is the remainder."""
        remaining_seconds = self._get_elapsed_seconds() - sum(self._spent.values())
        return {"productive": max(remaining_seconds, 0.0), **self._spent}

    def summary(self) -> dict[str, float]:
        """Return the metrics of the whole run, for its result."""
        seconds = self.seconds()
        summary = {f"{kind}_seconds": value for kind, value in seconds.items()}
        summary["goodput"] = seconds["productive"] / self._get_elapsed_seconds()
        if self._whole[1]:
            summary["tokens_per_second"] = self._whole[0] / self._whole[1]
            if self.utilization is not None:
                summary["mfu"] = self.utilization.of(summary["tokens_per_second"])
        return summary

    def _get_elapsed_seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-9) + self._earlier


def peak_memory() -> float | None:
    """Return the peak memory of the fullest device of this process, in bytes; on a CPU, of the
    process.

    None if neither is known.
    """
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    known_peaks = [peak for peak in peaks if peak is not None]
    if known_peaks:
        return float(max(known_peaks))
    if sys.platform == "win32":
        return None
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(largest if sys.platform == "darwin" else largest * 1024)


#: Folder of a run with its trace.
PROFILE = "profile"


class ProfileWindow:
    """Traces a few steps, once in a run.

    Args:
        arguments: `profile_start_step`, `profile_steps`, `save_directory`.
        say: prints a message.
    """

    def __init__(self, arguments: TrainingArguments, say: Callable[[str], None]):
        self._first, self._count = arguments.profile_start_step, arguments.profile_steps
        self._directory = Path(arguments.save_directory) / PROFILE
        self._say = say
        self._last: int | None = None  # while tracing

    def before(self, step: int) -> None:
        """Start the trace if this step (from 1) is the first of the window."""
        if step == self._first:
            jax.profiler.start_trace(self._directory)
            self._last = step + self._count - 1

    def ends_with(self, step: int) -> bool:
        """Return whether this step is the last of the window; the caller then waits and calls
        `stop`."""
        return self._last is not None and step >= self._last

    def stop(self) -> None:
        """Write the trace, if one was started."""
        if self._last is not None:
            self._last = None
            jax.profiler.stop_trace()
            self._say(f"the trace of steps from {self._first} is in {self._directory}")
