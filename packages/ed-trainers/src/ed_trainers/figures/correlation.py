"""Correlations of the cosines of pairs of texts with their scores.

The names are those of MTEB: `cosine_spearman`, `cosine_pearson`.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of vectors, [n]."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return (left * right).sum(axis=-1) / np.maximum(lengths, 1e-24)


def correlations(
    predicted_values: np.ndarray, expected: np.ndarray, prefix: str = ""
) -> dict[str, float]:
    """Return the rank correlation of Spearman and the correlation of Pearson.

    A correlation with numbers that are all equal is not defined; the value is 0 then.

    Args:
        predicted_values: numbers of the model, [n].
        expected: numbers of the data, [n].
        prefix: first part of the names.
    """
    from scipy.stats import pearsonr, spearmanr

    predicted_values = np.asarray(predicted_values, np.float64)
    expected = np.asarray(expected, np.float64)
    names = (f"{prefix}spearman", f"{prefix}pearson")
    if len(predicted_values) < 2 or np.ptp(predicted_values) == 0 or np.ptp(expected) == 0:
        return dict.fromkeys(names, 0.0)
    values: Any = (
        spearmanr(predicted_values, expected)[0],
        pearsonr(predicted_values, expected)[0],
    )
    return dict(zip(names, map(float, values), strict=True))
