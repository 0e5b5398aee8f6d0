"""Selection of the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ed_infra.errors import unknown_name

from ed_trainers.options.base import TrainingArguments

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
