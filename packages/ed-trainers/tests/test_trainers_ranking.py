"""Metrics of rankings, correlations and the linear classifier, compared with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.figures import ranking
from ed_trainers.figures.linear_probe import classification_metrics, predictions
from ed_trainers.figures.ranking import (
    Ranking,
    TopDocuments,
    average_precision,
    correlations,
    cosines,
    rank_documents,
    reranking_metrics,
    retrieval_metrics,
)


def test_metrics_of_one_ranking_equal_their_definitions():
    one = Ranking(np.array([0.0, 2.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    found = retrieval_metrics([one], (1, 4))
    best = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    assert found["ndcg_at_4"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / best)
    assert found["mrr_at_4"] == 0.5
    assert found["recall_at_4"] == pytest.approx(2 / 3)
    assert found["map_at_100"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    assert found["ndcg_at_1"] == found["mrr_at_1"] == found["recall_at_1"] == 0.0


def test_equal_scores_give_the_worst_order():
    gains = np.array([1.0, 0.0, 0.0, 0.0])
    found = reranking_metrics([rank_documents(np.zeros(4), gains)])
    assert found["map"] == found["mrr_at_10"] == 0.25
    assert average_precision(np.zeros(4), gains) == 0.25


def test_score_that_is_not_finite_raises_error():
    with pytest.raises(ConfigError, match="not finite"):
        rank_documents(np.array([0.1, np.nan]), np.array([1, 0]))
    with pytest.raises(ConfigError, match="not finite"):
        TopDocuments(np.array([[np.inf, 1.0]]), 1)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_search_does_not_depend_on_chunks(similarity, monkeypatch):
    random = np.random.default_rng(0)
    queries, corpus = random.normal(size=(7, 8)), random.normal(size=(60, 8))
    corpus[40:50] = corpus[:10]  # equal scores
    relevant = [{int(i): 1.0 for i in random.choice(60, 3, replace=False)} for _ in queries]

    def rankings(size):
        search = TopDocuments(queries, 20, similarity)
        for start in range(0, len(corpus), size):
            search.add(corpus[start : start + size])
        return [one.gains.tolist() for one in search.rankings(relevant)]

    expected = rankings(60)
    assert rankings(60) == rankings(17)
    monkeypatch.setattr(ranking, "SCORES_AT_ONCE", 50)
    assert rankings(1) == rankings(33) == expected


def test_classifier_equals_scikit_learn():
    sklearn = pytest.importorskip("sklearn.linear_model")
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for classes in (2, 4):
        means = random.normal(size=(classes, 12))
        labels = random.integers(0, classes, 120)
        rows = means[labels] + 1.5 * random.normal(size=(120, 12))
        names = [f"class {i}" for i in labels]
        model = sklearn.LogisticRegression(max_iter=5000, tol=1e-8).fit(rows[:80], names[:80])
        found = predictions(rows[:80], names[:80], rows[80:])
        expected = model.predict(rows[80:]).tolist()
        assert found == expected
        ours = classification_metrics(found, names[80:])
        assert 0.5 < ours["accuracy"] < 1.0
        assert ours["f1"] == pytest.approx(metrics.f1_score(names[80:], found, average="macro"))


def test_correlations_of_constant_numbers_are_zero():
    assert correlations(np.ones(4), np.arange(4)) == {"spearman": 0.0, "pearson": 0.0}
    assert cosines(np.zeros((1, 3)), np.ones((1, 3)))[0] == 0.0
