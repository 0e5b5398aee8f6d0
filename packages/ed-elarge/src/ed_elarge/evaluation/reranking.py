"""Reranking: the order of the documents of each query, by a cross-encoder or by embeddings."""

from __future__ import annotations

import numpy as np
from ed_data import DataError
from ed_infra.errors import ConfigError
from ed_trainers.figures.ranking import rank_documents, reranking_metrics, similarities

from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.evaluation.local_rows import (
    count_examples,
    get_rows,
    get_text_field,
    get_text_fields,
)
from ed_elarge.evaluation.text_model import TextModel


class Reranking:
    """Queries with relevant and other documents.

    Args:
        task: The files and cutoffs.
        limit: Number of queries, or below 1 the fraction of them.

    Raises:
        DataError: A row is broken, or has no relevant or no other document.
    """

    def __init__(self, task: LocalTask, limit: float | None) -> None:
        assert task.data_files
        rows = []
        for place, row in get_rows(task.data_files):
            query = get_text_field(place, row, "query")
            positive, negative = (
                get_text_fields(place, row, name) for name in ("positive", "negative")
            )
            for name, documents in (("positive", positive), ("negative", negative)):
                if not documents:
                    raise DataError(f"{place}: {name} is empty, and nothing can be ranked")
            rows.append((query, positive, negative))
        self._rows = rows[: count_examples(len(rows), limit)]
        self._k = task.k

    def evaluate(self, model: TextModel) -> dict[str, float]:
        """Return the MAP of the whole lists, and MRR and nDCG at each cutoff."""
        rankings = []
        for (_, positive, negative), scores in zip(self._rows, self._scores(model), strict=True):
            gains = np.repeat([1.0, 0.0], [len(positive), len(negative)])
            rankings.append(rank_documents(scores, gains))
        return reranking_metrics(rankings, self._k)

    def _scores(self, model: TextModel) -> list[np.ndarray]:
        """Return the scores of the documents of each query."""
        documents = [positive + negative for _, positive, negative in self._rows]
        ends = np.cumsum([len(query_documents) for query_documents in documents])[:-1]
        queries = [query for query, _, _ in self._rows]
        if model.scores_pairs:
            pairs = [
                (q, d)
                for q, query_documents in zip(queries, documents, strict=True)
                for d in query_documents
            ]
            return np.split(model.score(pairs), ends)
        if not model.embeds:
            raise ConfigError(
                "a reranking task needs a cross-encoder with one output (num_labels=1) or an "
                "embedding model, and the model is a classifier with several labels"
            )
        query_vectors = model.embed(queries, "query")
        document_vectors = np.split(
            model.embed([d for query_documents in documents for d in query_documents], "document"),
            ends,
        )
        return [
            similarities(query[None], query_documents, model.similarity)[0]
            for query, query_documents in zip(query_vectors, document_vectors, strict=True)
        ]
