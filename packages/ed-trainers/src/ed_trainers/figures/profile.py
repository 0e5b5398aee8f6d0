"""A window of steps that jax's profiler traces; Perfetto, XProf and TensorBoard show the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from ed_trainers.options.base import TrainingArguments

#: Folder of a run that holds its trace.
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
        self._last: int | None = None  # while it traces

    def before(self, step: int) -> None:
        """Begin to trace, if this step (from 1) is the first of the window."""
        if step == self._first:
            jax.profiler.start_trace(self._directory)
            self._last = step + self._count - 1

    def ends_with(self, step: int) -> bool:
        """Whether this step is the last of the window: wait for it, then call `stop`."""
        return self._last is not None and step >= self._last

    def stop(self) -> None:
        """Write the trace, if one was begun."""
        if self._last is not None:
            self._last = None
            jax.profiler.stop_trace()
            self._say(f"the trace of steps from {self._first} is in {self._directory}")
