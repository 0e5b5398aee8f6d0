"""A linear classifier of frozen embeddings, and the metrics of its predictions.

The classifier is scikit-learn's `LogisticRegression` with C = 1: the sum of the cross-entropies and
half the squared norm of the weights, without the intercepts. The minimum is unique.

Legend: n rows, d features, c classes, m outputs (1 for two classes, otherwise c).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def predictions(
    features: np.ndarray, labels: Sequence[str], test_features: np.ndarray, iterations: int = 1000
) -> list[str]:
    """Fit the classifier on rows, and return the labels of other rows.

    Args:
        features: embeddings of the training rows, [n, d].
        labels: label of each training row, at least two different ones.
        test_features: embeddings of the rows to classify, [k, d].
        iterations: largest number of iterations of L-BFGS.
    """
    from scipy.optimize import minimize

    names, target = np.unique(np.asarray(labels, dtype=object).astype(str), return_inverse=True)
    count, width = len(names), features.shape[1]
    outputs = 1 if count == 2 else count
    x = np.asarray(features, np.float64)
    one_hot_targets = np.eye(count)[target]

    def logits(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        class_scores = rows @ values[:-outputs].reshape(width, outputs) + values[-outputs:]
        return (
            np.concatenate([np.zeros_like(class_scores), class_scores], axis=1)
            if count == 2
            else class_scores
        )

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        scores = logits(values, x)
        scores -= scores.max(axis=1, keepdims=True)
        total = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        change = (np.exp(scores - total) - one_hot_targets)[:, -outputs:]
        weights = values[:-outputs]
        value = (total[:, 0] - scores[np.arange(len(x)), target]).sum() + 0.5 * weights @ weights
        gradient = (x.T @ change).ravel() + weights
        return value, np.concatenate([gradient, change.sum(axis=0)])

    start = np.zeros(width * outputs + outputs)
    options = {"maxiter": iterations, "gtol": 1e-6, "ftol": 1e-14}
    solution = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    class_indices = logits(solution.x, np.asarray(test_features, np.float64)).argmax(axis=1)
    return names[class_indices].tolist()


def classification_metrics(
    predicted_labels: Sequence[str], expected: Sequence[str]
) -> dict[str, float]:
    """Return the accuracy and the macro F1, over the classes that are found or expected."""
    ours, true = np.asarray(predicted_labels), np.asarray(expected)
    scores = []
    for name in np.unique(np.concatenate([ours, true])):
        hits = np.count_nonzero((ours == name) & (true == name))
        scores.append(2 * hits / (np.count_nonzero(ours == name) + np.count_nonzero(true == name)))
    return {"accuracy": float(np.mean(ours == true)), "f1": float(np.mean(scores))}
