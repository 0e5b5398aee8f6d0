"""Compare methods that train encoders with the models of transformers on torch.

Our documents share rows; on torch each document has a separate row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.method_cases import harness

SIZES = {
    name: harness.SIZES[name]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
} | {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1}


@cache
def folder(kind: str, labels: int = 2) -> Path:
    """Save a tiny random BERT of transformers, such as `BertForMaskedLM`."""
    import torch
    import transformers

    torch.manual_seed(labels)
    path = Path(tempfile.mkdtemp(prefix="encoders-"))
    config = transformers.BertConfig.from_dict({**SIZES, "num_labels": labels})
    getattr(transformers, kind)(config).save_pretrained(path)
    return path


def their_model(kind: str, labels: int = 2) -> Any:
    """Load the model with torch in float64, without dropout."""
    import transformers

    return getattr(transformers, kind).from_pretrained(folder(kind, labels)).eval().double()


def our_model(kind: str, task: str, labels: int = 2) -> Any:
    """Load the model in float32."""
    from ed_infra import registry
    from ed_infra.enums import TaskType

    module = registry.get_module(TaskType(task), "bert")
    return module.from_pretrained(folder(kind, labels), sharding_axis_dims=(1, 1, 1, 1, 1))


def our_trainer(method: str, kind: str, task: str, labels: int = 2, **options: Any) -> Any:
    """Return the trainer of a method for the model, with a tokenizer that has a mask token."""
    model = our_model(kind, task, labels)
    tokenizer = harness.tokenizer()
    tokenizer.mask_token = f"t{harness.VOCAB - 1}"
    return harness.trainer_of(method, model, processing_class=tokenizer, **options)


def places(segments: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the row and the positions of each document of packed rows."""
    for row, inside in enumerate(segments):
        for number in range(1, inside.max() + 1):
            yield row, np.flatnonzero(inside == number)


def documents_of(batch: harness.Arrays, **more: np.ndarray) -> dict[str, Any]:
    """Return the packed documents as padded tensors: ids, attention mask, and further arrays.

    Padding of `labels` is -100, and of other arrays 0.
    """
    arrays = {"input_ids": batch["input_ids"], **more}
    found = list(places(np.asarray(batch["segment_ids"])))
    tensors = {
        name: harness.padded(
            [array[row, at].tolist() for row, at in found], -100 if name == "labels" else 0
        )
        for name, array in arrays.items()
    }
    tensors["attention_mask"] = harness.padded([[1] * len(at) for _, at in found], 0)
    return tensors


def mlm() -> dict[str, float]:
    """Compare `mlm` with `BertForMaskedLM` on the masked batch."""
    trainer = our_trainer("mlm", "BertForMaskedLM", "masked-language-model", mlm_probability=0.4)
    batch = harness.packed([chosen for chosen, _ in harness.pairs()], 2)
    prepared = trainer.prepare(batch)
    labels = np.full(prepared["input_ids"].shape, -100)
    rows, slots = np.nonzero(prepared["weights"])
    labels[rows, prepared["masked_positions"][rows, slots]] = prepared["targets"][rows, slots]
    model = their_model("BertForMaskedLM")
    loss = model(**documents_of(prepared, labels=labels)).loss
    return harness.errors(
        harness.our_outcome(trainer, batch), harness.their_outcome(model, loss, {})
    )


def token_classification() -> dict[str, float]:
    """Compare `token_classification` with `BertForTokenClassification`."""
    kind, labels = "BertForTokenClassification", 5
    trainer = our_trainer("token_classification", kind, "token-classification", labels)
    batch = dict(harness.packed([chosen for chosen, _ in harness.pairs()], 2))
    # The answer has labels, the prompt has none.
    batch["labels"] = np.where(batch["labels"] >= 0, batch["input_ids"] % labels, -100)
    model = their_model(kind, labels)
    tensors = documents_of(batch, labels=batch["labels"])
    output = model(**tensors)
    here = tensors["labels"] >= 0
    right = (output.logits.argmax(-1) == tensors["labels"])[here].double().mean()
    theirs = harness.their_outcome(model, output.loss, {"accuracy": right})
    return harness.errors(harness.our_outcome(trainer, batch), theirs)


def sequence_classification() -> dict[str, float]:
    """Compare `sequence_classification` with `BertForSequenceClassification` on pairs of texts."""
    import torch

    kind, labels = "BertForSequenceClassification", 3
    trainer = our_trainer("sequence_classification", kind, "sequence-classification", labels)
    tensors = harness.answer_tensors([chosen for chosen, _ in harness.pairs()])
    types = tensors.pop("completion_mask")
    tensors |= {"token_type_ids": types, "labels": torch.arange(len(types)) % labels}
    batch = {name: tensor.numpy().astype(np.int32) for name, tensor in tensors.items()}
    model = their_model(kind, labels)
    output = model(**tensors)
    right = (output.logits.argmax(-1) == tensors["labels"]).double().mean()
    theirs = harness.their_outcome(model, output.loss, {"accuracy": right})
    return harness.errors(harness.our_outcome(trainer, batch), theirs)


CASES = {
    "sequence_classification": harness.Case(
        "`BertForSequenceClassification` of transformers", sequence_classification
    ),
    "token_classification": harness.Case(
        "`BertForTokenClassification` of transformers", token_classification
    ),
    "mlm": harness.Case("`BertForMaskedLM` of transformers", mlm),
}
