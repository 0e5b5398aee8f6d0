"""A trace of some steps by jax's profiler; Perfetto, XProf and TensorBoard show the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from ed_trainers.options.base import TrainingArguments

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
