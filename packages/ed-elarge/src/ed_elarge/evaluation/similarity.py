"""Semantic textual similarity: the cosines of pairs of texts follow the scores of the data."""

from __future__ import annotations

import numpy as np
from ed_trainers.figures.ranking import correlations, cosines

from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.evaluation.local_rows import (
    count_examples,
    get_number_field,
    get_rows,
    get_text_field,
)
from ed_elarge.evaluation.text_model import TextModel

_SENTENCES = ("sentence1", "sentence2")


class Similarity:
    """Pairs of texts with scores.

    Args:
        task: The files.
        limit: Number of pairs, or below 1 the fraction of them.

    Raises:
        DataError: A row is broken.
    """

    def __init__(self, task: LocalTask, limit: float | None) -> None:
        assert task.data_files
        rows = [
            (
                get_text_field(place, row, "sentence1"),
                get_text_field(place, row, "sentence2"),
                get_number_field(place, row, "score"),
            )
            for place, row in get_rows(task.data_files)
        ]
        self._rows = rows[: count_examples(len(rows), limit)]

    def evaluate(self, model: TextModel) -> dict[str, float]:
        """Return the correlations of Spearman and Pearson."""
        model.check_embeds("sts")
        left, right, scores = map(list, zip(*self._rows, strict=True))
        predicted_scores = cosines(model.embed(left), model.embed(right))
        return correlations(predicted_scores, np.array(scores), prefix="cosine_")
