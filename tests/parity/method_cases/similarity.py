"""Compare the losses of embeddings and of cross-encoders with torch in float64, over BERT.

Our pairs of texts share rows; on torch each text has a separate row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.parity.method_cases import encoders, harness

#: Number of pairs.
COUNT = 6


def texts(sides: tuple[str, ...]) -> list[list[harness.Answer]]:
    """Return documents of each side, different for each side."""
    found = []
    for number in range(len(sides)):
        both = harness.pairs(COUNT, seed=number // 2)
        found.append(
            [harness.Answer([], d.prompt + d.answer) for d in (p[number % 2] for p in both)]
        )
    return found


def embedding(loss_type: str, **options: Any) -> dict[str, float]:
    """Compare `embedding` with a formula of sentence-transformers in float64."""
    import torch
    from ed_trainers import arguments_class
    from torch.nn.functional import cross_entropy, mse_loss, normalize

    arguments: Any = arguments_class("embedding")(**{"loss_type": loss_type, **options})
    sides, teacher = texts(arguments.sides), None
    scores = np.random.default_rng(0).random((COUNT, max(len(arguments.scores), 1)))
    batch: dict[str, np.ndarray] = {}
    for number, (name, documents) in enumerate(zip(arguments.sides, sides, strict=True)):
        values = {}
        if number == 0:
            values = {n: scores[:, i].tolist() for i, n in enumerate(arguments.scores)}
        batch |= harness.packed(documents, 2, name, **values)
    frozen = {}
    if loss_type == "mse":
        teacher = encoders.their_model("BertModel", 3)
        frozen = {"teacher": encoders.our_model("BertModel", "embedding", 3)}
    model = encoders.our_model("BertModel", "embedding")
    trainer = harness.trainer_of("embedding", model, frozen, loss_type=loss_type, **options)
    ours = harness.our_outcome(trainer, batch)
    theirs = encoders.their_model("BertModel")

    def embed(model: Any, documents: list[harness.Answer]) -> Any:
        tensors = harness.answer_tensors(documents)
        mask = tensors["attention_mask"]
        hidden = model(tensors["input_ids"], attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True)

    for parameter in theirs.pooler.parameters():  # is saved with the model, but not read
        parameter.grad = torch.zeros_like(parameter)
    vectors, metrics = [embed(theirs, side) for side in sides], {}
    labels = torch.tensor(scores.astype(np.float32)).double()
    total: Any = 0.0
    for cut in options.get("matryoshka_dims", (vectors[0].shape[-1],)):
        parts = [v[:, :cut] for v in vectors]
        unit = [normalize(v, dim=-1) for v in parts]
        cosines = (unit[0] * unit[1]).sum(-1)
        match loss_type:
            case "multiple_negatives_ranking":
                everything = unit[0] @ torch.cat(unit[1:]).T
                total = total + cross_entropy(everything * 20, torch.arange(COUNT))
                right = everything.argmax(-1) == torch.arange(COUNT)
                metrics["accuracy"] = right.double().mean()
            case "cosine_similarity":
                total = total + mse_loss(cosines, labels[:, 0])
            case "cosent":
                scaled = cosines * 20
                gaps = scaled[:, None] - scaled[None, :]
                below = (labels[:, 0][:, None] < labels[:, 0][None, :]).double()
                gaps = (gaps - (1 - below) * 1e12).view(-1)
                total = total + torch.logsumexp(torch.cat([torch.zeros(1), gaps]), dim=0)
            case "margin_mse":
                used = unit if "matryoshka_dims" in options else parts
                dots = [(used[0] * other).sum(-1) for other in used[1:]]
                margins = torch.stack([dots[0] - other for other in dots[1:]], dim=1)
                total = total + mse_loss(margins, labels)
            case "mse":
                targets = [embed(teacher, side).detach() for side in sides]
                total = sum(mse_loss(a, b) for a, b in zip(vectors, targets, strict=True)) / 2
    return harness.errors(ours, harness.their_outcome(theirs, total, metrics))


def cross_encoder(loss_type: str, **options: Any) -> dict[str, float]:
    """Compare `cross_encoder` with `BertForSequenceClassification` and torch's losses."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

    kind = "BertForSequenceClassification"
    trainer = encoders.our_trainer(
        "cross_encoder", kind, "sequence-classification", 1, loss_type=loss_type, **options
    )
    model, metrics = encoders.their_model(kind, 1), {}
    sides = trainer.arguments.sides
    found = []
    for documents in texts(sides or ("",)):
        tensors = harness.answer_tensors(documents)
        tensors["token_type_ids"] = tensors.pop("completion_mask")
        found.append(tensors)
    logits = torch.stack([model(**tensors).logits[:, 0] for tensors in found], dim=1)
    labels = torch.linspace(0, 1, COUNT, dtype=torch.float32).double()
    if sides:
        loss = cross_entropy(logits, torch.zeros(COUNT, dtype=torch.long))
        metrics["accuracy"] = (logits.argmax(-1) == 0).double().mean()
    elif loss_type == "mse":
        loss = mse_loss(logits[:, 0], labels)
    else:
        weight = options.get("pos_weight")
        weight = None if weight is None else torch.tensor(weight, dtype=torch.double)
        loss = binary_cross_entropy_with_logits(logits[:, 0], labels, pos_weight=weight)
        metrics["accuracy"] = ((logits[:, 0] > 0) == (labels > 0.5)).double().mean()
    batch = {"labels": labels.numpy()}
    for name, tensors in zip(sides or ("",), found, strict=True):
        lead = f"{name}_" if name else ""
        for key, tensor in tensors.items():
            array = tensor.numpy().astype(np.int32)
            batch[lead + key] = np.pad(array, ((0, 0), (0, harness.LENGTH - array.shape[1])))
    return harness.errors(
        harness.our_outcome(trainer, batch), harness.their_outcome(model, loss, metrics)
    )


_ST = "formula of sentence-transformers, torch in float64"
_RANKING = "multiple_negatives_ranking"
CASES = {
    "embedding hard negatives": harness.Case(_ST, partial(embedding, _RANKING, num_negatives=2)),
    "embedding hard negatives, Matryoshka, mini-batches": harness.Case(
        _ST,
        partial(embedding, _RANKING, num_negatives=1, matryoshka_dims=(8, 32), mini_batch_size=3),
    ),
    "embedding cosine_similarity": harness.Case(_ST, partial(embedding, "cosine_similarity")),
    "embedding cosent": harness.Case(_ST, partial(embedding, "cosent")),
    "embedding margin_mse": harness.Case(_ST, partial(embedding, "margin_mse", num_negatives=2)),
    "embedding margin_mse, Matryoshka": harness.Case(
        _ST, partial(embedding, "margin_mse", num_negatives=1, matryoshka_dims=(16, 32))
    ),
    "embedding mse": harness.Case(_ST, partial(embedding, "mse")),
    "cross_encoder": harness.Case(
        "`BertForSequenceClassification` of transformers, torch's binary cross-entropy",
        partial(cross_encoder, "binary_cross_entropy", pos_weight=2.5),
    ),
    "cross_encoder mse": harness.Case(
        "`BertForSequenceClassification` of transformers", partial(cross_encoder, "mse")
    ),
    "cross_encoder localized_contrastive": harness.Case(
        "`BertForSequenceClassification` of transformers, 2101.08751",
        partial(cross_encoder, "localized_contrastive", num_negatives=2),
    ),
}
