"""Metrics of embeddings: rankings of documents, and correlations of cosines with scores.

The names are those of MTEB: `ndcg_at_10`, `mrr_at_10`, `recall_at_10`, `map_at_100`, `map`,
`cosine_spearman`, `cosine_pearson`. The values of rankings are those of the evaluators of
sentence-transformers.

Legend: q queries, c documents of a chunk, d features, k kept documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError

Gains = np.ndarray

#: Largest number of scores that exist at the same time.
SCORES_AT_ONCE = 1 << 24
#: Depth of the mean average precision of a retrieval, as in sentence-transformers.
MAP_DEPTH = 100


@dataclass(frozen=True)
class Ranking:
    """The ranked documents of one query.

    Attributes:
        gains: relevance of the documents, best document first; 0 = not relevant.
        relevant: relevance of all relevant documents of the query, also of those not found.
    """

    gains: Gains
    relevant: Gains

    def reciprocal_rank(self, k: int) -> float:
        """Return 1 / the rank of the first relevant document; 0 if the first k have none."""
        hits = np.flatnonzero(self.gains[:k] > 0)
        return float(1 / (hits[0] + 1)) if len(hits) else 0.0

    def ndcg(self, k: int) -> float:
        """Return the normalized discounted cumulative gain (Järvelin and Kekäläinen, 2002)."""
        best = _compute_dcg(np.sort(self.relevant)[::-1][:k])
        return _compute_dcg(self.gains[:k]) / best

    def recall(self, k: int) -> float:
        """Return the share of the relevant documents among the first k."""
        return float(np.count_nonzero(self.gains[:k] > 0) / len(self.relevant))

    def average_precision(self, k: int | None = None) -> float:
        """Return the mean precision at the relevant documents; missing ones count 0.

        With k, the divisor is at most k.
        """
        hits = self.gains[:k] > 0
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        most = len(self.relevant) if k is None else min(k, len(self.relevant))
        return float(precision[hits].sum() / most)


def _compute_dcg(gains: Gains) -> float:
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


def retrieval_metrics(rankings: Sequence[Ranking], k: Sequence[int] = (10,)) -> dict[str, float]:
    """Return nDCG, MRR and recall at each k, and the MAP at 100; means over the queries."""
    metrics: dict[str, float] = {}
    for cut in k:
        metrics[f"ndcg_at_{cut}"] = _mean([one.ndcg(cut) for one in rankings])
        metrics[f"mrr_at_{cut}"] = _mean([one.reciprocal_rank(cut) for one in rankings])
        metrics[f"recall_at_{cut}"] = _mean([one.recall(cut) for one in rankings])
    metrics[f"map_at_{MAP_DEPTH}"] = _mean([one.average_precision(MAP_DEPTH) for one in rankings])
    return metrics


def reranking_metrics(rankings: Sequence[Ranking], k: Sequence[int] = (10,)) -> dict[str, float]:
    """Return the MAP of the whole lists, and MRR and nDCG at each k; means over the queries."""
    metrics = {"map": _mean([one.average_precision() for one in rankings])}
    for cut in k:
        metrics[f"mrr_at_{cut}"] = _mean([one.reciprocal_rank(cut) for one in rankings])
        metrics[f"ndcg_at_{cut}"] = _mean([one.ndcg(cut) for one in rankings])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def rank_documents(scores: np.ndarray, gains: Gains) -> Ranking:
    """Return the ranking of documents by scores.

    Among equal scores, documents with a smaller relevance come first: a model that gives all
    documents one score has the worst order, not the order of the file.
    """
    scores, gains = np.asarray(scores, np.float64), np.asarray(gains, np.float64)
    if not np.isfinite(scores).all():
        raise ConfigError("a score of the model is not finite: the weights have diverged")
    return Ranking(gains[np.lexsort((gains, -scores))], gains[gains > 0])


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the average precision of binary labels; see `rank_documents` for equal scores."""
    return rank_documents(scores, (np.asarray(labels) > 0).astype(np.float64)).average_precision()


class TopDocuments:
    """Finds the k best documents of each query. The corpus is scored in chunks.

    Equal scores: the earlier document is better, whatever the sizes of the chunks.

    Args:
        queries: embeddings of the queries, [q, d].
        k: number of kept documents.
        similarity: `cosine`, `dot`, `euclidean` or `manhattan`.
    """

    def __init__(self, queries: np.ndarray, k: int, similarity: str = "cosine") -> None:
        self._similarity = similarity
        self._queries = _prepare_vectors(queries, similarity)
        self._k, self._seen = k, 0
        self._scores = np.empty((len(queries), 0), np.float32)
        self._documents = np.empty((len(queries), 0), np.int64)

    def add(self, chunk: np.ndarray) -> None:
        """Score the next documents of the corpus, [c, d]."""
        chunk = _prepare_vectors(chunk, self._similarity)
        document_count = min(self._k, self._seen + len(chunk))
        scores = np.empty((len(self._queries), document_count), np.float32)
        documents = np.empty((len(self._queries), document_count), np.int64)
        document_numbers = np.arange(self._seen, self._seen + len(chunk))
        rows = max(1, SCORES_AT_ONCE // (len(chunk) + self._k))
        for start in range(0, len(self._queries), rows):
            part = slice(start, start + rows)
            new = _similarities(self._queries[part], chunk, self._similarity)
            all_scores = np.concatenate([self._scores[part], new], axis=1)
            old = self._documents[part]
            all_documents = np.concatenate(
                [old, np.broadcast_to(document_numbers, (len(old), len(document_numbers)))], axis=1
            )
            order = np.argsort(-all_scores, axis=1, kind="stable")[:, :document_count]
            scores[part] = np.take_along_axis(all_scores, order, axis=1)
            documents[part] = np.take_along_axis(all_documents, order, axis=1)
        self._scores, self._documents = scores, documents
        self._seen += len(chunk)

    def rankings(self, relevant: Sequence[Mapping[int, float]]) -> list[Ranking]:
        """Return the ranking of each query.

        Args:
            relevant: for each query, number of a document -> its relevance, above 0.
        """
        return [
            Ranking(
                np.array([gains.get(number, 0.0) for number in row]), np.array([*gains.values()])
            )
            for row, gains in zip(self._documents.tolist(), relevant, strict=True)
        ]


def similarities(left: np.ndarray, right: np.ndarray, similarity: str) -> np.ndarray:
    """Return the similarity of every left vector to every right vector, [n, m]."""
    return _similarities(
        _prepare_vectors(left, similarity), _prepare_vectors(right, similarity), similarity
    )


def _prepare_vectors(vectors: np.ndarray, similarity: str) -> np.ndarray:
    vectors = np.asarray(vectors, np.float32)
    if not np.isfinite(vectors).all():
        raise ConfigError("an embedding has numbers that are not finite: the weights have diverged")
    if similarity != "cosine":
        return vectors
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def _similarities(left: np.ndarray, right: np.ndarray, similarity: str) -> np.ndarray:
    if similarity in ("cosine", "dot"):
        return left @ right.T
    order = {"euclidean": 2, "manhattan": 1}[similarity]
    return np.stack([-np.linalg.norm(row - right, ord=order, axis=1) for row in left])


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
