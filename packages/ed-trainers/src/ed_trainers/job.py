"""`Job`: what a trainer hands to the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ed_trainers.batches import Feed
from ed_trainers.contract import Method
from ed_trainers.options.base import TrainingArguments
from ed_trainers.placement import Placement
from ed_trainers.probes import Probe
from ed_trainers.running.evaluation import Evaluator
from ed_trainers.state import EasyDeLState


class Notify(Protocol):
    """Tells callbacks of an event."""

    def __call__(self, event: str, *values: object) -> None:
        """Call the method `event` of every callback with the values."""
        ...


@dataclass(frozen=True)
class Job:
    """The parts of one training run.

    Attributes:
        arguments: options of the run.
        total_steps: updates of the whole run.
        feed: the training batches.
        method: batch, loss and frozen models.
        placement: puts batches on the devices.
        evaluator: of the held-out data, if there are any.
        probes: look at the model every so many steps.
        begin: makes the state that training begins with, unless a checkpoint has a later one.
        adopt: takes a state whose arrays replace those of `begin`.
        save_model: writes the trained model into a directory.
        notify: tells callbacks.
    """

    arguments: TrainingArguments
    total_steps: int
    feed: Feed
    method: Method
    placement: Placement
    evaluator: Evaluator | None
    probes: tuple[Probe, ...]
    begin: Callable[[], EasyDeLState]
    adopt: Callable[[EasyDeLState], None]
    save_model: Callable[[Path], None]
    notify: Notify
