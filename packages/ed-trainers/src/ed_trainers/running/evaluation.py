"""Evaluation: means over all tokens of the held-out data, independent of the batch shapes.

`Best` selects the best evaluation of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import jax
from ed_infra.errors import ConfigError, unknown_name

from ed_trainers.batches import Dataset, HostBatch, Share, evaluation_batches
from ed_trainers.contract import MAIN, Batch, MethodRun, build_log_metrics
from ed_trainers.options.base import TrainingArguments
from ed_trainers.placement import Placement, pad_rows
from ed_trainers.state import EasyDeLState
from ed_trainers.step import EvalStep, Leaves, Metrics, Step, build_eval_step, build_statistics_step

# exp of a larger number overflows.
_LARGEST_EXPONENT = 700.0

Show = Callable[[int, int | None], None]
Sums = dict[str, list[float]]


class Evaluator:
    """Evaluates states of one model; compiles once.

    Args:
        method: batch, loss and frozen models.
        placement: puts batches on the devices.
        dataset: a loader with `batch_at(step)` and `steps_per_epoch`, or an iterable.
        rows: number of rows of a batch; None uses the batches of the dataset.
        limit: number of batches of the dataset that an evaluation reads; None: all.
    """

    def __init__(
        self,
        method: MethodRun,
        placement: Placement,
        dataset: Dataset,
        *,
        rows: int | None,
        limit: int | None = None,
    ):
        self._method = method
        self._limit = limit
        self._placement = placement
        self._dataset = dataset
        whole_batches = method.whole_batches
        self._share = Share(dataset) if whole_batches else Share.of(dataset, placement, rows)
        self._rows = None if rows is None else rows // self._share.parts
        self._step: EvalStep | None = None
        self._statistics: Step[Metrics] | None = None

    def run(self, state: EasyDeLState, show: Show | None = None) -> dict[str, float]:
        """Return `eval_<name>` for each metric of `build_log_metrics` and the method's `measure`.

        A loss per token also has `eval_perplexity`.

        The perplexity belongs to the method's own term, if that is a mean over tokens.

        Args:
            state: parameters to evaluate.
            show: called with the number of finished batches and the total number, if known.

        Raises:
            ConfigError: the data have no token to evaluate.
        """
        if self._step is None:
            self._step = build_eval_step(state, self._method)
        leaves = tuple(jax.tree.leaves((state.graphstate, state.graphother, state.reference)))
        statistics = self._whole_statistics(state, leaves, show)
        sums: tuple[Sums, Sums] = {}, {}
        pending: tuple[Metrics, ...] = ()
        for batch in self._batches(state, show):
            result = self._step(leaves, batch.replace(**statistics))
            _add(sums, pending)
            pending = result
        _add(sums, pending)
        if not sums[0] or sums[0][MAIN][1] == 0:
            raise ConfigError("eval_dataset has no token with a weight: pass data with labels")
        terms, metrics = map(_means, sums)
        means = {f"eval_{name}": value for name, value in build_log_metrics(terms, metrics).items()}
        if self._method.record.per_token:
            means["eval_perplexity"] = math.exp(min(terms[MAIN], _LARGEST_EXPONENT))
            means["eval_tokens"] = sums[0][MAIN][1]
        measure = self._method.record.measure
        if measure is not None:
            batches = evaluation_batches(self._dataset, self._limit)[0]
            method_metrics = measure(self._method, batches, state)
            means |= {f"eval_{name}": value for name, value in method_metrics.items()}
        return means

    def _whole_statistics(
        self, state: EasyDeLState, leaves: Leaves, show: Show | None
    ) -> dict[str, Any]:
        """Return the means of the method's statistics over all held-out batches.

        Empty for a method without statistics. The loss of a batch reads these means, so `eval_loss`
        does not depend on the batch size.

        Raises:
            ConfigError: the held-out data can be read only once.
        """
        if self._method.record.statistics is None:
            return {}
        dataset = self._share.dataset
        # A loader of ed-data is an iterator that restarts; it has a `state_dict`.
        if isinstance(dataset, Iterator) and not hasattr(dataset, "state_dict"):
            raise ConfigError(
                f"eval_dataset {type(dataset).__name__} can be read only once, and this method "
                "reads the held-out data twice: pass a list of batches, or a loader"
            )
        if self._statistics is None:
            self._statistics = build_statistics_step(state, self._method)
        sums: Sums = {}
        for batch in self._batches(state, show):
            batch_statistics = self._statistics(leaves, batch)
            if not batch_statistics:
                return {}
            _add((sums,), (batch_statistics,))
        return _means(sums)

    def _batches(self, state: EasyDeLState, show: Show | None) -> Iterator[Batch]:
        """Yield placed batches with the same number of rows; the last one is padded."""
        batches, count = evaluation_batches(self._share.dataset, self._limit)

        def show_progress() -> Iterator[HostBatch]:
            for index, batch in enumerate(batches):
                if show is not None:
                    show(index, count)
                yield batch

        rows = self._rows
        for prepared in self._method.held_out(show_progress(), state):
            height = next(iter(prepared.values())).shape[0]
            rows = rows or height
            for start in range(0, height, rows):
                piece = jax.tree.map(itemgetter(slice(start, start + rows)), prepared)
                padded = pad_rows(piece, rows)
                yield self._placement.place(padded, stacked=False, parts=self._share.parts)


def _means(sums: Sums) -> dict[str, float]:
    return {name: total / max(weight, 1e-30) for name, (total, weight) in sums.items()}


def _add(sums: tuple[Sums, ...], metrics: tuple[Metrics, ...]) -> None:
    # `metrics` is empty before the first batch.
    for of, batch_metrics in zip(sums, metrics, strict=False):
        _add_metrics(of, batch_metrics)


def _add_metrics(sums: Sums, metrics: Metrics) -> None:
    for name, metric in jax.device_get(metrics).items():
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(metric.sum)
        entry[1] += float(metric.weight)


_LESS_IS_BETTER = ("loss", "perplexity", "wer", "cer")


class Best:
    """Compares the evaluations of a run.

    Args:
        arguments: `metric_for_best_model`, `greater_is_better`.
    """

    def __init__(self, arguments: TrainingArguments):
        name = arguments.metric_for_best_model or "loss"
        #: Name of the metric, as in a row of the metrics.
        self.metric = name if name.startswith("eval_") else f"eval_{name}"
        greater = arguments.greater_is_better
        self._greater = not name.endswith(_LESS_IS_BETTER) if greater is None else greater

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Check that an evaluation has the metric.

        Raises:
            ConfigError: the evaluation lacks the metric.
        """
        if self.metric not in metrics:
            raise unknown_name("metric_for_best_model", self.metric, metrics)

    def score(self, row: Mapping[str, Any] | None) -> float | None:
        """Return the score of an evaluation (larger is better); None if the metric is missing or
        not finite."""
        value = None if row is None else row.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        return value if self._greater else -value
