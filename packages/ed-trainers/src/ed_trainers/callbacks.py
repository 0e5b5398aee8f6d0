"""Hooks into the loop. A callback sees the run and may end it; it cannot change the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ed_models.protocol import LanguageModel

from ed_trainers.options.base import TrainingArguments
from ed_trainers.rollout import Weights
from ed_trainers.state import EasyDeLState


class RunningTrainer(Protocol):
    """The interface of a trainer to callbacks; `ed_trainers.trainer.Trainer` implements it."""

    @property
    def arguments(self) -> TrainingArguments:
        """The options of the run."""
        ...

    @property
    def model(self) -> LanguageModel:
        """The model with its present weights; the next step overwrites them."""
        ...

    @property
    def state(self) -> EasyDeLState | None:
        """The present state, optimizer state and all; the next step overwrites it."""
        ...

    @property
    def total_steps(self) -> int:
        """Number of updates of the whole run."""
        ...

    def weights(self) -> Weights:
        """The present weights, readable until the next step begins."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Evaluate the present weights."""
        ...

    def save_model(self, directory: str | Path) -> Path:
        """Write the present model in Hugging Face layout, and return the written directory."""
        ...

    def save_checkpoint(self) -> None:
        """Save a checkpoint after the present step."""
        ...

    def stop(self, reason: str) -> None:
        """End the run cleanly after the present step, with a checkpoint."""
        ...


class Callback:
    """Base class of callbacks. Every method is called on every process.

    Results are read back one step late: in `on_log` the row of step n comes with the weights of
    step n + 1, unless an evaluation, a checkpoint or the end waited for step n.
    """

    def on_train_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Training begins; `step` updates are done already."""

    def on_log(self, trainer: RunningTrainer, row: Mapping[str, Any]) -> None:
        """A row of metrics was written."""

    def on_evaluate(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""

    def on_save(self, trainer: RunningTrainer, step: int) -> None:
        """A checkpoint of this step was begun; it is complete when training ends at the latest."""

    def on_train_end(self, trainer: RunningTrainer, step: int) -> None:
        """Training ended after this many updates."""
