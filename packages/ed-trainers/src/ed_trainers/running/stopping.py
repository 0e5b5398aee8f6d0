"""Stopping, or saving, at the next step instead of at once: signals, and the time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

Handler = Callable[[int, FrameType | None], Any] | int | None

# SIGHUP, which Windows lacks, is a terminal that closed.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_SAVE = getattr(signal, "SIGUSR1", None)
# A shell script starts its background jobs with SIGINT ignored; SIGINT still stops a training.
# Only nohup, which ignores SIGHUP, keeps its meaning.
_HANGUP = getattr(signal, "SIGHUP", None)


class StopRequest:
    """Watches for a reason to stop. A context manager: signal handlers are put back at its end.

    The first SIGINT, SIGTERM or SIGHUP asks for a stop at the next step; a second SIGINT interrupts
    at once. SIGUSR1 asks for a checkpoint. Outside the main thread, where Python cannot install
    handlers, only the limit counts.

    Args:
        time_limit: seconds after which to stop, or None.
    """

    def __init__(self, time_limit: float | None = None):
        self._limit = time_limit
        self._began = time.monotonic()
        self._reason: str | None = None
        self._save = False
        self._old: dict[int, Handler] = {}

    def __enter__(self) -> StopRequest:
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
        """Ask for a checkpoint from inside (a callback)."""
        self._save = True

    def take_save(self) -> bool:
        """Tell whether a checkpoint was asked for, once; all processes hear it with `reason`."""
        asked, self._save = self._save, False
        return asked

    def ask(self, reason: str) -> None:
        """Ask for a stop from inside (a callback)."""
        self._reason = self._reason or reason

    @property
    def reason(self) -> str | None:
        """Why to stop, or None: a signal's name, `time limit`, or the words of `ask`.

        With many processes this is a collective: all of them stop if one has a reason.
        """
        out_of_time = self._limit is not None and time.monotonic() - self._began >= self._limit
        if self._reason is None and out_of_time:
            self._reason = "time limit"
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            own = np.asarray([self._reason is not None, self._save])
            stops, saves = np.moveaxis(multihost_utils.process_allgather(own), -1, 0)
            self._save = bool(saves.any())
            if stops.any() and self._reason is None:
                self._reason = "another process"
        return self._reason
