"""Compare question answering and multiple choice with the models of transformers on torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.parity.method_cases import encoders, harness


def question_answering() -> dict[str, float]:
    """Compare `question_answering` with `BertForQuestionAnswering`."""
    import torch

    kind = "BertForQuestionAnswering"
    trainer = encoders.our_trainer("question_answering", kind, "question-answering")
    tensors = harness.answer_tensors([chosen for chosen, _ in harness.pairs()])
    tensors["token_type_ids"] = tensors.pop("completion_mask")
    lengths = tensors["attention_mask"].sum(-1)
    tensors |= {"start_positions": lengths // 2, "end_positions": lengths - 1}
    tensors["start_positions"][0] = tensors["end_positions"][0] = 0  # no answer
    model = encoders.their_model(kind)
    losses, exact, overlaps = [], [], []
    for i, length in enumerate(lengths.tolist()):
        # One row at a time, without padding.
        row = {name: x[i : i + 1] for name, x in tensors.items()}
        row = {name: x[:, :length] if x.ndim > 1 else x for name, x in row.items()}
        output = model(**row)
        losses.append(output.loss)
        pairs = [(a, b) for a in range(length) for b in range(a, length)]
        scores = [(output.start_logits[0, a] + output.end_logits[0, b]).item() for a, b in pairs]
        first, last = pairs[int(np.argmax(scores))]
        answer = {*range(int(row["start_positions"]), int(row["end_positions"]) + 1)}
        found = {*range(first, last + 1)}
        exact.append(found == answer)
        overlaps.append(2 * len(found & answer) / (len(found) + len(answer)))
    metrics = {"exact_match": np.mean(exact), "f1": np.mean(overlaps)}
    batch = {name: tensor.numpy().astype(np.int32) for name, tensor in tensors.items()}
    loss = torch.stack(losses).mean()
    return harness.errors(
        harness.our_outcome(trainer, batch), harness.their_outcome(model, loss, metrics)
    )


def multiple_choice() -> dict[str, float]:
    """Compare `multiple_choice` with `BertForMultipleChoice`."""
    import torch

    kind = "BertForMultipleChoice"
    trainer = encoders.our_trainer("multiple_choice", kind, "multiple-choice", num_choices=2)
    documents = [answer for pair in harness.pairs() for answer in pair]
    tensors: dict[str, Any] = harness.answer_tensors(documents)
    tensors["token_type_ids"] = tensors.pop("completion_mask")
    stacked = {name: x.reshape(-1, 2, x.shape[-1]) for name, x in tensors.items()}
    labels = torch.arange(len(documents) // 2) % 2
    model = encoders.their_model(kind)
    output = model(**stacked, labels=labels)
    right = (output.logits.argmax(-1) == labels).double().mean()
    batch = {
        f"choice_{n + 1}_{name}": x[:, n].numpy().astype(np.int32)
        for name, x in stacked.items()
        for n in range(2)
    }
    batch["labels"] = labels.numpy().astype(np.int32)
    return harness.errors(
        _without_bias(harness.our_outcome(trainer, batch)),
        _without_bias(harness.their_outcome(model, output.loss, {"accuracy": right})),
    )


def _without_bias(outcome: harness.Outcome) -> harness.Outcome:
    """Drop the gradient of the bias, which shifts all scores alike: it is 0 except for rounding."""
    gradients = dict(outcome.gradients)
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    assert np.abs(gradients.pop("classifier.bias")).max() <= 1e-6 * largest
    return dataclasses.replace(outcome, gradients=gradients)


CASES = {
    "question_answering": harness.Case(
        "`BertForQuestionAnswering` of transformers", question_answering
    ),
    "multiple_choice": harness.Case("`BertForMultipleChoice` of transformers", multiple_choice),
}
