"""Hooks into the loop. A callback sees the run and may end it; it cannot change the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Callback:
    """Base of callbacks: override what is needed. Every method is called on every process.

    `trainer` is the running trainer; `trainer.stop(reason)` ends the run cleanly after the present
    step, with a checkpoint.
    """

    def on_train_begin(self, trainer: Any, step: int) -> None:
        """Training begins; `step` updates are done already."""

    def on_log(self, trainer: Any, row: Mapping[str, Any]) -> None:
        """A row of metrics was written."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""

    def on_save(self, trainer: Any, step: int) -> None:
        """A checkpoint of this step was begun; it is complete when training ends at the latest."""

    def on_train_end(self, trainer: Any, step: int) -> None:
        """Training ended after this many updates."""


class CallbackList:
    """Calls each callback in order."""

    def __init__(self, callbacks: Iterable[Callback] = ()):
        self._callbacks = tuple(callbacks)

    def call(self, event: str, *arguments: Any) -> None:
        """Call one method of every callback."""
        for callback in self._callbacks:
            getattr(callback, event)(*arguments)
