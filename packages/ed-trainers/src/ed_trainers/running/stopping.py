"""Reasons to end a run: signals, the time limit, and a loss that is not finite."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from ed_infra.errors import EasyDeLError

Handler = Callable[[int, FrameType | None], Any] | int | None

# SIGHUP: the terminal closed. Windows lacks it.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_SAVE = getattr(signal, "SIGUSR1", None)
# A shell script starts background jobs with SIGINT ignored; SIGINT still stops training. An ignored
# SIGHUP stays ignored, because nohup sets it.
_HANGUP = getattr(signal, "SIGHUP", None)


class StopRequest:
    """Collects reasons to stop; a context manager that restores the signal handlers at its end.

    The first SIGINT, SIGTERM or SIGHUP requests a stop at the next step; a second SIGINT interrupts
    immediately. SIGUSR1 requests a checkpoint. Python installs handlers in the main thread only, so
    in other threads only the limit applies.

    Args:
        time_limit: number of seconds after which to stop, or None.
        save_interval: number of seconds after a checkpoint after which the first process requests
            the next one, or None.
    """

    def __init__(self, time_limit: float | None = None, save_interval: float | None = None):
        self._limit, self._save_interval = time_limit, save_interval
        self._began = self._saved = time.monotonic()
        self._reason: str | None = None
        self._save = False
        self._old: dict[int, Handler] = {}

    def note_save(self) -> None:
        """Start the save interval again."""
        self._saved = time.monotonic()

    def __enter__(self) -> StopRequest:
        self.note_save()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != _HANGUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._on_signal)
            if _SAVE is not None:
                self._old[_SAVE] = signal.signal(_SAVE, self._on_save)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._reason = signal.Signals(number).name

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True

    def ask_save(self) -> None:
        """Request a checkpoint, for example from a callback."""
        self._save = True

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested, and clear the request.

        `reason` shares the request with the other processes.
        """
        is_requested, self._save = self._save, False
        return is_requested

    def ask(self, reason: str) -> None:
        """Request a stop, for example from a callback."""
        self._reason = self._reason or reason

    @property
    def reason(self) -> str | None:
        """The reason to stop, or None: the name of a signal, `time limit`, or a reason of `ask`.

        With several processes this is a collective: all processes stop if one has a reason, and all
        save if one was asked to, or if the save interval of the first process has ended.
        """
        interval = self._save_interval
        if interval is not None and jax.process_index() == 0:
            self._save = self._save or time.monotonic() - self._saved >= interval
        out_of_time = self._limit is not None and time.monotonic() - self._began >= self._limit
        if self._reason is None and out_of_time:
            self._reason = "time limit"
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            local_flags = np.asarray([self._reason is not None, self._save])
            stops, saves = np.moveaxis(multihost_utils.process_allgather(local_flags), -1, 0)
            self._save = bool(saves.any())
            if stops.any() and self._reason is None:
                self._reason = "another process"
        return self._reason


class TrainingDiverged(EasyDeLError):
    """The loss or the gradient is not finite."""


class Divergence:
    """Checks the figures of each step.

    Args:
        longest: number of consecutive skipped steps after which the run ends.
    """

    def __init__(self, longest: int):
        self._longest = longest
        self._skipped = 0

    def check(
        self, step: int, figures: Mapping[str, float], get_steps: Callable[[], Sequence[int]]
    ) -> None:
        """Check a step.

        Args:
            figures: `loss`, `grad_norm`, and `skipped` if the optimizer skips bad steps.
            get_steps: returns the steps of the checkpoints in rising order, for the message.

        Raises:
            TrainingDiverged: a figure is not finite and the step was not skipped, or too many
                consecutive steps were skipped.
        """
        skipped = bool(figures.get("skipped"))
        self._skipped = self._skipped + 1 if skipped else 0
        if skipped and self._skipped < self._longest:
            return
        if not skipped and math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"]):
            return
        many = f", {self._longest} steps in a row were skipped" if skipped else ""
        steps = get_steps()
        checkpoint_note = "there is no checkpoint"
        if steps:
            checkpoint_note = f"the checkpoint of step {steps[-1]} is intact"
        raise TrainingDiverged(
            f"step {step}: loss {figures['loss']}, gradient norm {figures['grad_norm']}{many}; "
            f"{checkpoint_note}. Lower learning_rate, add warmup_steps, or set clip_grad"
        )
