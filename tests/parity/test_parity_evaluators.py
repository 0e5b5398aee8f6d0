"""Metrics of embeddings and scores equal those of the evaluators of sentence-transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_trainers.figures.ranking import (
    TopDocuments,
    correlations,
    cosines,
    rank_documents,
    reranking_metrics,
    retrieval_metrics,
)

pytestmark = pytest.mark.torch
pytest.importorskip("sentence_transformers")

K = (1, 5, 10)


def test_retrieval_equals_information_retrieval_evaluator() -> None:
    import torch
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim

    random = np.random.default_rng(0)
    queries = {f"q{i}": f"query {i}" for i in range(9)}
    corpus = {f"d{i}": f"document {i}" for i in range(300)}
    relevant = {q: {f"d{i}" for i in random.choice(300, 1 + 15 * n)} for n, q in enumerate(queries)}
    vectors = {t: random.normal(size=6) for t in (*queries.values(), *corpus.values())}

    class Given(InformationRetrievalEvaluator):
        def embed_inputs(self, model: Any, sentences: Any, **options: Any) -> Any:
            return torch.tensor(np.stack([vectors[text] for text in sentences])).float()

    evaluator = Given(
        queries,
        corpus,
        relevant,
        corpus_chunk_size=70,
        mrr_at_k=list(K),
        ndcg_at_k=list(K),
        precision_recall_at_k=list(K),
        map_at_k=[100],
        score_functions={"cosine": cos_sim},
        write_csv=False,
    )
    model = SimpleNamespace(
        similarity_fn_name="cosine",
        similarity=cos_sim,
        model_card_data=SimpleNamespace(set_evaluation_metrics=lambda *a, **k: None),
    )
    theirs = evaluator.compute_all_metrics(model)["cosine"]
    search = TopDocuments(np.stack([vectors[text] for text in queries.values()]), 100)
    documents = np.stack([vectors[text] for text in corpus.values()])
    for start in range(0, 300, 64):
        search.add(documents[start : start + 64])
    wanted = [{int(d[1:]): 1.0 for d in relevant[q]} for q in queries]
    ours = retrieval_metrics(search.rankings(wanted), K)
    expected = {"map_at_100": theirs["map@k"][100]}
    for k in K:
        expected |= {
            f"ndcg_at_{k}": theirs["ndcg@k"][k],
            f"mrr_at_{k}": theirs["mrr@k"][k],
            f"recall_at_{k}": theirs["recall@k"][k],
        }
    assert 0 < ours["ndcg_at_10"] < 1
    assert ours == pytest.approx(expected, abs=1e-7)


def test_correlations_equal_embedding_similarity_evaluator() -> None:
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    random = np.random.default_rng(1)
    left, right = random.normal(size=(2, 50, 8)).astype(np.float32)
    scores = np.round(5 * cosines(left, right) + random.normal(size=50))
    names = [f"{side}{i}" for side in "ab" for i in range(50)]
    vectors = dict(zip(names, [*left, *right], strict=True))

    class Given(EmbeddingSimilarityEvaluator):
        def embed_inputs(self, model: Any, sentences: Any, **options: Any) -> Any:
            return np.stack([vectors[text] for text in sentences])

    evaluator = Given(names[:50], names[50:], scores, main_similarity="cosine", write_csv=False)
    model = SimpleNamespace(
        similarity_fn_name="cosine",
        model_card_data=SimpleNamespace(set_evaluation_metrics=lambda *a, **k: None),
    )
    theirs = evaluator(model)
    ours = correlations(cosines(left, right), scores, prefix="cosine_")
    assert ours["cosine_spearman"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)
    assert ours["cosine_pearson"] == pytest.approx(theirs["pearson_cosine"], abs=1e-6)


def test_reranking_equals_cross_encoder_reranking_evaluator() -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    random = np.random.default_rng(2)
    samples = [
        {
            "query": f"q{i}",
            "positive": [f"p{i}.{j}" for j in range(1 + i % 4)],
            "negative": [f"n{i}.{j}" for j in range(3 + 2 * i)],
        }
        for i in range(12)
    ]
    pairs = [(s["query"], d) for s in samples for d in (*s["positive"], *s["negative"])]
    scores = dict(zip(pairs, random.normal(size=len(pairs)), strict=True))
    evaluator = CrossEncoderRerankingEvaluator(samples, at_k=10, write_csv=False)
    model = SimpleNamespace(
        predict=lambda asked, **options: np.array([scores[tuple(pair)] for pair in asked]),
        model_card_data=SimpleNamespace(set_evaluation_metrics=lambda *a, **k: None),
    )
    theirs = evaluator(model)
    rankings = [
        rank_documents(
            np.array([scores[s["query"], d] for d in (*s["positive"], *s["negative"])]),
            np.repeat([1.0, 0.0], [len(s["positive"]), len(s["negative"])]),
        )
        for s in samples
    ]
    expected = {name.replace("@", "_at_"): value for name, value in theirs.items()}
    assert reranking_metrics(rankings) == pytest.approx(expected, abs=1e-9)
