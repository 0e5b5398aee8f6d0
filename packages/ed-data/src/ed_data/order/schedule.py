"""Mixture weights that change over the training steps: stepwise, linearly, or along a cosine.

The weights at a step are integer multiples of 2^-32, so all arithmetic is exact. A block of
documents is divided by the weights of the step at which its window begins. The fraction of a
document that an inform is owed is added to the next block, so the number of documents follows the
weight within about one document.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ed_data.order.mixing import DocumentOrder, build_order
from ed_data.tokens.encoded import IntArray

UNIT = 2**32
_BLOCKS = 9  # identifies a use of the seed, as in mixing


@dataclass(frozen=True)
class WeightSchedule:
    """Weights by step.

    Attributes:
        kind: interpolation between two points: `step`, `linear` or `cosine`.
        steps: steps of the points, ascending from 0.
        weights: [points][informs].
    """

    kind: str
    steps: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]

    def parts(self, step: int) -> list[int]:
        """Return the share of each inform at a step, in units of 1 / `UNIT`; the sum is `UNIT`."""
        at = bisect_right(self.steps, step) - 1
        weights = _normal(self.weights[at])
        if self.kind != "step" and at + 1 < len(self.steps):
            way = (step - self.steps[at]) / (self.steps[at + 1] - self.steps[at])
            if self.kind == "cosine":
                way = (1 - math.cos(math.pi * way)) / 2
            following = _normal(self.weights[at + 1])
            weights = [a + (b - a) * way for a, b in zip(weights, following, strict=True)]
        # Nine digits, because the last digits of a cosine may differ between machines.
        parts = [int(round(weight, 9) * UNIT) for weight in weights]
        parts[int(np.argmax(parts))] += UNIT - sum(parts)
        return parts


def _normal(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def divide_block(
    size: int, parts: Sequence[int], owed: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Divide a block among the informs.

    Args:
        size: number of documents of the block.
        parts: share of each inform, with the sum `UNIT`.
        owed: documents that earlier blocks owe to each inform, times `UNIT`; the sum is 0.

    Returns:
        The number of documents of each inform, and the documents owed after the block.
    """
    due = [size * part + debt for part, debt in zip(parts, owed, strict=True)]
    counts = [max(amount // UNIT, 0) for amount in due]
    remainders = [amount - count * UNIT for amount, count in zip(due, counts, strict=True)]
    while (missing := size - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        able = [i for i, part in enumerate(parts) if (part if step > 0 else counts[i])]
        inform = max(able, key=lambda i: (step * remainders[i], -i))
        counts[inform] += step
        remainders[inform] -= step * UNIT
    return counts, remainders


class ScheduledOrder(DocumentOrder):
    """An order of documents with scheduled weights; see `DocumentOrder`.

    An epoch has as many documents as all informs together. All blocks of a window use the weights
    of the step at which the window begins; `set_windows` defines the windows.

    Args:
        sizes: number of documents of each inform, at least 1.
        schedule: the weights.
        block_size: number of documents in which the proportions are exact; None for a window.
        seed: seed of the order.
        shuffle: see `DocumentOrder`.
        buffer: `shuffle_buffer_size`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        schedule: WeightSchedule,
        *,
        block_size: int | None,
        seed: int,
        shuffle: bool = True,
        buffer: int | None = None,
    ) -> None:
        super().__init__(sizes, block_size=block_size, seed=seed, shuffle=shuffle, buffer=buffer)
        self._schedule = schedule
        self._make = lru_cache(maxsize=4)(self._make_window)

    def set_windows(self, window: int, get_step: Callable[[int], int]) -> None:
        """Define the windows of a plan.

        Args:
            window: number of documents of a window; the last window of an epoch may have fewer.
            get_step: maps the number of a window, counted over all epochs, to the step at which the
                window begins.
        """
        self._window, self._step_of = window, get_step
        self._windows = -(-self.epoch_size // window)
        none = [0] * len(self._sizes)
        #: Documents drawn from, and owed to, each inform at the beginning of each window.
        self._begins = [(none, none)]

    def take(self, epoch: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return the informs and document numbers at some positions; see `DocumentOrder.take`."""
        stop = min(stop, self.epoch_size)
        if start >= stop:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = start // self._window
        numbers = range(first, (stop - 1) // self._window + 1)
        parts = [self._make(epoch * self._windows + number) for number in numbers]
        cut = slice(start - first * self._window, stop - first * self._window)
        inform, document = (np.concatenate(arrays)[cut] for arrays in zip(*parts, strict=True))
        return inform, document

    def documents_per_epoch(self) -> list[int]:
        """Return the number of documents of each inform in the first epoch."""
        return list(self._begin(self._windows)[0])

    def _begin(self, number: int) -> tuple[list[int], list[int]]:
        while len(self._begins) <= number:
            *_, last = self._blocks(len(self._begins) - 1)
            self._begins.append(last)
        return self._begins[number]

    def _blocks(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Return the documents drawn from, and owed to, each inform before and after each block."""
        drawn, owed = self._begin(number)
        begin = number % self._windows * self._window
        size = min(self._window, self.epoch_size - begin)
        parts = self._schedule.parts(self._step_of(number))
        result = [(drawn, owed)]
        for at in range(0, size, self._block):
            counts, owed = divide_block(min(self._block, size - at), parts, owed)
            drawn = [drawn_count + count for drawn_count, count in zip(drawn, counts, strict=True)]
            result.append((drawn, owed))
        return result

    def _make_window(self, number: int) -> tuple[IntArray, IntArray]:
        drawn = [np.array(start_counts, np.int64) for start_counts, _ in self._blocks(number)]
        blocks = [
            self._arrange_block(
                drawn[at + 1] - start_counts,
                start_counts.tolist(),
                (_BLOCKS, self._seed, number, at) if self._shuffle else None,
            )
            for at, start_counts in enumerate(drawn[:-1])
        ]
        inform, document = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        return inform, document


class ScheduledShares:
    """Scheduled shares of the blocks of a stream; see `mixing.Shares`.

    Attributes:
        block: number of documents in which the proportions are exact.
        step: training step at the beginning of the next block.
    """

    def __init__(self, schedule: WeightSchedule, block: int) -> None:
        self._schedule, self.block, self.step = schedule, block, 0
        none = [0] * len(schedule.weights[0])
        self._number, self._counts, self._owed = -1, none, none

    def block_order(self, number: int, key: tuple[int, ...] | None) -> IntArray:
        """Return the inform at each position of the current block or the next block."""
        if number != self._number:
            parts = self._schedule.parts(self.step)
            self._counts, self._owed = divide_block(self.block, parts, self._owed)
            self._number = number
        counts = np.array(self._counts, np.int64)
        return np.repeat(np.arange(len(counts)), counts)[build_order(counts, key)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current block, as JSON values."""
        return {"block": self._number, "counts": list(self._counts), "owed": list(self._owed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the block of a state."""
        self._number = state["block"]
        self._counts, self._owed = list(state["counts"]), list(state["owed"])
