"""Losses, gradients and scores equal those of sentence-transformers over a tiny BERT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_infra.testing import require_torch

require_torch()
pytest.importorskip("sentence_transformers")

from tests.parity.method_cases import encoders, harness, similarity  # noqa: E402 - imports torch inside

#: Largest relative error of losses and gradients, in float32 on both sides.
LIMIT = 1e-5


def body() -> Any:
    """Return a SentenceTransformer over the BERT of `encoders`, without dropout."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    harness.tokenizer().save_pretrained(encoders.folder("BertModel"))
    transformer = Transformer(str(encoders.folder("BertModel")))
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[transformer, pooling], device="cpu").eval().double()


#: Our options -> their loss, wrapped in MatryoshkaLoss if we have `matryoshka_dims`.
LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "in-batch negatives": (
        {"loss_type": "multiple_negatives_ranking"},
        "MultipleNegativesRankingLoss",
    ),
    "hard negatives": (
        {"loss_type": "multiple_negatives_ranking", "num_negatives": 2},
        "MultipleNegativesRankingLoss",
    ),
    "mini-batches": (
        {"loss_type": "multiple_negatives_ranking", "num_negatives": 1, "mini_batch_size": 2},
        "CachedMultipleNegativesRankingLoss",
    ),
    "Matryoshka": (
        {
            "loss_type": "multiple_negatives_ranking",
            "matryoshka_dims": (8, 32),
            "matryoshka_weights": (0.5, 1.0),
        },
        "MultipleNegativesRankingLoss",
    ),
    "symmetric": (
        {"loss_type": "multiple_negatives_ranking", "symmetric": True},
        "MultipleNegativesSymmetricRankingLoss",
    ),
    "cosine": ({"loss_type": "cosine_similarity"}, "CosineSimilarityLoss"),
    "cosent": ({"loss_type": "cosent"}, "CoSENTLoss"),
    "cosent, Matryoshka": (
        {"loss_type": "cosent", "matryoshka_dims": (8, 32)},
        "CoSENTLoss",
    ),
    "margin": ({"loss_type": "margin_mse", "num_negatives": 1}, "MarginMSELoss"),
    "margins": ({"loss_type": "margin_mse", "num_negatives": 3}, "MarginMSELoss"),
    "margins, Matryoshka": (
        {"loss_type": "margin_mse", "num_negatives": 1, "matryoshka_dims": (16, 32)},
        "MarginMSELoss",
    ),
    "teacher": ({"loss_type": "mse"}, "MSELoss"),
}


@pytest.mark.daily("hard negatives", "cosent")
@pytest.mark.parametrize("name", LOSSES)
def test_embedding_losses_equal_those_of_sentence_transformers(
    name: str, record_property: Any
) -> None:
    import torch
    from sentence_transformers.sentence_transformer import losses

    options, kind = LOSSES[name]
    cached = kind.startswith("Cached")
    trainer_options = dict(options)
    frozen = {}
    if options["loss_type"] == "mse":
        frozen = {"teacher": encoders.our_model("BertModel", "embedding", 3)}
    trainer = harness.trainer_of(
        "embedding", encoders.our_model("BertModel", "embedding"), frozen, **trainer_options
    )
    arguments = trainer.arguments
    sides = similarity.texts(arguments.sides)
    scores = np.random.default_rng(0).random(
        (similarity.COUNT, max(len(arguments.scores), 1)), np.float32
    )
    batch: dict[str, np.ndarray] = {}
    for number, (side, documents) in enumerate(zip(arguments.sides, sides, strict=True)):
        values = {n: scores[:, i].tolist() for i, n in enumerate(arguments.scores)}
        batch |= harness.packed(documents, 2, side, **(values if number == 0 else {}))
    ours = harness.our_outcome(trainer, batch)

    model = body()
    loss: Any = getattr(losses, kind)(model, **({"mini_batch_size": 2} if cached else {}))
    if dims := options.get("matryoshka_dims"):
        weights = options.get("matryoshka_weights")
        loss = losses.MatryoshkaLoss(model, loss, list(dims), weights and list(weights))
    features = []
    for documents in sides:
        tensors = harness.answer_tensors(documents)
        tensors.pop("completion_mask")
        features.append(tensors)
    labels = torch.tensor(scores).double()
    labels = labels[:, 0] if labels.shape[1] == 1 else labels
    if options["loss_type"] == "mse":
        teacher = encoders.their_model("BertModel", 3)

        def embed(tensors: dict[str, Any]) -> Any:
            hidden = teacher(**tensors).last_hidden_state
            mask = tensors["attention_mask"][..., None]
            return (hidden * mask).sum(1) / mask.sum(1)

        labels = torch.stack([embed(tensors).detach() for tensors in features], dim=1)
    value = loss([dict(tensors) for tensors in features], labels)
    inner = model[0].auto_model if hasattr(model[0], "auto_model") else model[0].model
    for parameter in inner.pooler.parameters():
        parameter.grad = torch.zeros_like(parameter)
    theirs = harness.their_outcome(inner, value, {})
    found = harness.errors(ours, theirs)
    record_property("summary", f"{name} against {kind}: {found}")
    assert max(found.values()) <= LIMIT, found


def test_cross_encoder_loss_equals_binary_cross_entropy_loss() -> None:
    import torch
    from sentence_transformers.cross_encoder import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from tokenizers.pre_tokenizers import WhitespaceSplit

    kind = "BertForSequenceClassification"
    trainer = encoders.our_trainer(
        "cross_encoder", kind, "sequence-classification", 1, pos_weight=2.0
    )
    path = encoders.folder(kind, 1)
    tokenizer = harness.tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save_pretrained(path)
    model = CrossEncoder(str(path), device="cpu").eval().double()
    words = [
        [" ".join(f"t{i}" for i in d.answer) for d in documents]
        for documents in similarity.texts(("query", "document"))
    ]
    labels = torch.linspace(0, 1, similarity.COUNT).double()
    loss = BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(2.0).double())(words, labels)
    inputs = model.tokenizer(*words, padding=True, return_tensors="np")
    batch = {name: np.asarray(inputs[name], np.int32) for name in inputs}
    batch["labels"] = labels.numpy()
    ours = harness.our_outcome(trainer, batch)
    inner = model[0].auto_model if hasattr(model, "__getitem__") else model.model
    found = harness.errors(ours, harness.their_outcome(inner, loss, {}))
    assert max(found.values()) <= LIMIT, found
