"""Training batches with the number of their step, from which a method draws random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ed_trainers.batches import Dataset, Feed, HostBatch, Share
from ed_trainers.contract import MethodRun

#: Name of the number of a training batch: the step, from 1.
STEP_KEY = "mask_step"
#: The number of held-out batches, whose random numbers are always the same.
_HELD_OUT = 0


class NumberedFeed(Feed):
    """The training batches with the number of their step."""

    def batch(self, step: int) -> HostBatch:
        batch = super().batch(step)
        return {**batch, STEP_KEY: np.asarray(step + 1)}


def feed(run: MethodRun[Any], dataset: Dataset) -> Feed:
    """Return the training batches of a dataset, by step."""
    return NumberedFeed(dataset, Share.of(dataset, run.placement, run.rows))


def get_batch_number(batch: HostBatch) -> int:
    """Return the number of a batch: its step, from 1, or 0 for held-out data."""
    return int(batch.get(STEP_KEY, _HELD_OUT))
