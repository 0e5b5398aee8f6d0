"""Tasks on embeddings of texts.

Classification is a logistic regression on frozen embeddings. In semantic similarity, the cosines of
pairs of texts follow the scores of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ed_data import DataError
from ed_trainers.figures.linear_probe import classification_metrics, predictions
from ed_trainers.figures.ranking import correlations, cosines

from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.evaluation.local_rows import (
    count_examples,
    get_number_field,
    get_rows,
    get_text_field,
    identity,
)
from ed_elarge.evaluation.text_model import TextModel


class ClassificationTask:
    """Texts with labels, for the fit and for the test.

    Args:
        task: The files.
        limit: Number of rows of the test, or below 1 the fraction of them.

    Raises:
        DataError: A row is broken, the training rows have one label, or the test has a label that
            they lack.
    """

    def __init__(self, task: LocalTask, limit: float | None) -> None:
        assert task.train_files
        assert task.test_files
        self._train = [row for _, row in _read_labeled_rows(task.train_files)]
        train_labels = {label for _, label in self._train}
        if len(train_labels) < 2:
            raise DataError(
                f"{task.train_files[0]}: all rows have the label {next(iter(train_labels))!r}; a "
                "classification needs at least two labels"
            )
        test = []
        for place, (content, label) in _read_labeled_rows(task.test_files):
            if label not in train_labels:
                raise DataError(f"{place}: no row of train_files has the label {label!r}")
            test.append((content, label))
        self._test = test[: count_examples(len(test), limit)]

    def evaluate(self, model: TextModel) -> dict[str, float]:
        """Return the accuracy and the macro F1 of the test."""
        model.check_embeds("classification")
        texts, labels = map(list, zip(*self._train, strict=True))
        test_texts, expected = map(list, zip(*self._test, strict=True))
        predicted_labels = predictions(model.embed(texts), labels, model.embed(test_texts))
        return classification_metrics(predicted_labels, expected)


def _read_labeled_rows(files: Sequence[str]) -> list[tuple[str, tuple[str, str]]]:
    return [
        (place, (get_text_field(place, row, "text"), identity(place, row, "label")))
        for place, row in get_rows(files)
    ]


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
