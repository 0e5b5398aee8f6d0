"""Outputs of a model on held-out rows, and the metrics of embeddings and scores of texts.

Legend: b rows, c texts of a row, p pairs of a row at most, n documents of a row, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from ed_infra.distributed import on_host
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, MethodRun, Prepared
from ed_trainers.figures.ranking import (
    MAP_DEPTH,
    Ranking,
    TopDocuments,
    average_precision,
    correlations,
    cosines,
    rank_documents,
    reranking_metrics,
    retrieval_metrics,
)
from ed_trainers.options.supervised import BCE, MARGIN_MSE
from ed_trainers.placement import pad_rows
from ed_trainers.state import EasyDeLState

#: Held-out pairs that are compared with each other; further pairs have only a loss.
MOST_PAIRS = 100_000
#: Documents of a chunk of the search.
_CHUNK = 4096


class HeldOutOutputs:
    """Computes an array for each held-out row; compiles once.

    Args:
        run: the run of the method.
    """

    def __init__(self, run: MethodRun[Any]):
        self._run = run
        self._rows = 0
        self._step: Callable[..., jax.Array] | None = None

    def each(
        self,
        batches: Iterable[HostBatch],
        state: EasyDeLState,
        compute: Callable[[LanguageModel, Batch], jax.Array],
    ) -> Iterator[tuple[Prepared, np.ndarray]]:
        """Yield each prepared batch with `compute(model, batch)`, float32 on the host.

        Args:
            batches: the held-out batches, whole on every process.
            state: the weights.
            compute: a pure function with rows in the first axis; the same at every call.
        """
        if self._step is None:
            graphdef = state.graphdef

            def step(leaves: tuple[nnx.State, nnx.State], batch: Batch) -> jax.Array:
                return compute(nnx.merge(graphdef, *leaves), batch)

            self._step = jax.jit(step)
        leaves = (state.graphstate, state.graphother)
        for batch in batches:
            prepared = self._run.prepare(batch)
            height = len(next(iter(prepared.values())))
            self._rows = max(self._rows, height)
            placed = self._run.placement.place(pad_rows(prepared, self._rows), stacked=False)
            yield prepared, np.asarray(on_host(self._step(leaves, placed)), np.float32)[:height]


def vector_metrics(
    run: MethodRun[Any], batch_outputs: Iterable[tuple[Prepared, np.ndarray]]
) -> dict[str, float]:
    """Return the metrics of embeddings; empty if the held-out data have no pair.

    With `anchor` and `positive`, each anchor searches its positive among the positives and
    negatives of all held-out rows (`ndcg_at_10`, `mrr_at_10`, `recall_at_10`, `map_at_100`). Equal
    texts are one document. With scores, the metrics are `cosine_spearman` and `cosine_pearson`.

    Args:
        run: the run of the method.
        batch_outputs: prepared batches with the embeddings of the texts, [b, c, p, d].
    """
    vectors, texts, scores, count = [], [], [], 0
    for prepared, batch_embeddings in batch_outputs:
        pair_mask = prepared["present"] > 0
        vectors.append(batch_embeddings.swapaxes(1, 2)[pair_mask])
        texts += _texts(prepared, pair_mask)
        scores += [prepared[name][pair_mask] for name in run.arguments.scores[:1]]
        count += int(pair_mask.sum())
        if count >= MOST_PAIRS:
            break
    if not count:
        return {}
    all_embeddings = np.concatenate(vectors)  # [pairs, c, d]
    if run.arguments.sides[0] == "sentence1":
        return correlations(
            cosines(all_embeddings[:, 0], all_embeddings[:, 1]),
            np.concatenate(scores),
            prefix="cosine_",
        )
    # The loss of margin_mse compares products of whole vectors.
    dot = run.arguments.loss_type == MARGIN_MSE and not run.arguments.matryoshka_dims
    return _retrieval(all_embeddings, texts, "dot" if dot else "cosine")


def score_metrics(
    run: MethodRun[Any], batch_outputs: Iterable[tuple[Prepared, np.ndarray]]
) -> dict[str, float]:
    """Return the metrics of a cross-encoder's scores.

    Rows with candidates have the metrics of reranking (`map`, `mrr_at_10`, `ndcg_at_10`). Pairs
    have `average_precision` if all labels are 0 or 1 and the loss is `binary_cross_entropy`,
    otherwise `spearman` and `pearson`.

    Args:
        run: the run of the method.
        batch_outputs: prepared batches with the scores, [b] or [b, n].
    """
    scores, labels, rankings = [], [], list[Ranking]()
    for prepared, batch_scores in batch_outputs:
        row_mask = prepared["weights"] > 0
        if run.arguments.sides:
            gains = np.eye(1, batch_scores.shape[1])[0]
            rankings += [rank_documents(row, gains) for row in batch_scores[row_mask]]
        else:
            scores.append(batch_scores[row_mask])
            labels.append(prepared["labels"][row_mask])
    if run.arguments.sides:
        return reranking_metrics(rankings) if rankings else {}
    if not scores or not sum(map(len, scores)):
        return {}
    values, all_labels = np.concatenate(scores), np.concatenate(labels)
    if run.arguments.loss_type == BCE and np.isin(all_labels, (0, 1)).all():
        return (
            {"average_precision": average_precision(values, all_labels)} if all_labels.any() else {}
        )
    return correlations(values, all_labels)


def _texts(prepared: Prepared, pair_mask: np.ndarray) -> list[list[bytes]]:
    """Return the tokens of the texts of each pair, as keys."""
    ids, segments = prepared["input_ids"], prepared["segment_ids"]  # [b, c, s]
    return [
        [
            side[side_segments == pair + 1].tobytes()
            for side, side_segments in zip(ids[row], segments[row], strict=True)
        ]
        for row, pair in zip(*np.nonzero(pair_mask), strict=True)
    ]


def _retrieval(vectors: np.ndarray, texts: list[list[bytes]], similarity: str) -> dict[str, float]:
    documents: dict[bytes, int] = {}
    queries: dict[bytes, int] = {}
    document_vectors: list[np.ndarray] = []
    query_vectors: list[np.ndarray] = []
    relevant: list[dict[int, float]] = []
    for row, (anchor, *candidates) in zip(vectors, texts, strict=True):
        for vector, text in zip(row[1:], candidates, strict=True):
            if documents.setdefault(text, len(documents)) == len(document_vectors):
                document_vectors.append(vector)
        if queries.setdefault(anchor, len(queries)) == len(query_vectors):
            query_vectors.append(row[0])
            relevant.append({})
        relevant[queries[anchor]][documents[candidates[0]]] = 1.0
    search = TopDocuments(np.stack(query_vectors), MAP_DEPTH, similarity)
    for start in range(0, len(document_vectors), _CHUNK):
        search.add(np.stack(document_vectors[start : start + _CHUNK]))
    return retrieval_metrics(search.rankings(relevant))
