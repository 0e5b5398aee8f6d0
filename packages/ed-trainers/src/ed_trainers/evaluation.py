"""Evaluation: means over every token of the held-out data, whatever the shapes of its batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric

from ed_trainers.contract import Method
from ed_trainers.feed import Dataset, Share, evaluation_batches
from ed_trainers.placement import Placement, pad_rows
from ed_trainers.state import EasyDeLState
from ed_trainers.step import EvalStep, build_eval_step

# exp of more than this is not a float.
_LARGEST_EXPONENT = 700.0

Show = Callable[[int, int | None], None]


class Evaluator:
    """Evaluates states of one model; compiles once.

    Args:
        method: its batch, its loss and its frozen models.
        placement: puts batches on the devices.
        dataset: a loader with `batch_at(step)` and `steps_per_epoch`, or an iterable.
        rows: sequences at once; None means as the dataset gives them.
    """

    def __init__(
        self,
        method: Method,
        placement: Placement,
        dataset: Dataset,
        *,
        rows: int | None,
    ):
        self._method = method
        self._placement = placement
        whole = method.whole_batches
        self._share = Share(dataset) if whole else Share.of(dataset, placement, rows)
        self._rows = None if rows is None else rows // self._share.parts
        self._step: EvalStep | None = None

    def run(self, state: EasyDeLState, show: Show | None = None) -> dict[str, float]:
        """Return `eval_<name>` of each loss and metric, and `eval_perplexity` of a loss per token.

        Args:
            state: parameters to evaluate.
            show: called with the number of batches done, and of all if that is known.

        Raises:
            ConfigError: there is not one token to evaluate.
        """
        if self._step is None:
            self._step = build_eval_step(state, self._method)
        leaves = tuple(jax.tree.leaves((state.graphstate, state.graphother, state.reference)))
        sums: dict[str, list[float]] = {}
        pending: dict[str, Metric] | None = None
        for batch in self._batches(state, show):
            placed = self._placement.place(batch, stacked=False, parts=self._share.parts)
            result = self._step(leaves, placed)
            if pending is not None:
                _add(sums, pending)
            pending = result
        if pending is not None:
            _add(sums, pending)
        if not sums or sums["loss"][1] == 0:
            raise ConfigError("eval_dataset has no token that counts: nothing can be evaluated")
        means = {
            f"eval_{name}": total / max(weight, 1e-30) for name, (total, weight) in sums.items()
        }
        if self._method.per_token:
            means["eval_perplexity"] = math.exp(min(means["eval_loss"], _LARGEST_EXPONENT))
            means["eval_tokens"] = sums["loss"][1]
        return means

    def _batches(self, state: EasyDeLState, show: Show | None) -> Iterator[dict[str, np.ndarray]]:
        """What is read of prepared batches of one number of rows; the last ones are padded."""
        batches, count = evaluation_batches(self._share.dataset)
        rows = self._rows
        for index, batch in enumerate(batches):
            if show is not None:
                show(index, count)
            if self._method.held_out is not None:
                prepared = self._method.held_out(batch, state)
            else:
                prepared = self._method.prepare(batch)
            height = next(iter(prepared.values())).shape[0]
            rows = rows or height
            for start in range(0, height, rows):
                piece = {name: array[start : start + rows] for name, array in prepared.items()}
                yield pad_rows(piece, rows)


def _add(sums: dict[str, list[float]], metrics: dict[str, Metric]) -> None:
    for name, metric in jax.device_get(metrics).items():
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(metric.sum)
        entry[1] += float(metric.weight)
