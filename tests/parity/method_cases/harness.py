"""Data, models and comparisons of the method cases, with a tiny model and one batch.

The reference is TRL's own trainer if TRL has the method. There each document has a separate row,
while ours share rows, so the comparison includes packing. `Case.measure` returns the largest
relative errors of the loss, of the metrics that both sides report, and of the gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

VOCAB, LENGTH = 64, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Answer:
    """A prompt and an answer, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Outcome:
    """Results of one side: loss, metrics by name, gradients by Hugging Face's parameter names."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)


def errors(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Return the largest relative errors; gradients relative to the largest entry of each."""
    shared = sorted({*ours.metrics} & {*theirs.metrics})
    assert shared or not theirs.metrics, "the two sides have no metric in common"
    metrics = [_relative(ours.metrics[name], theirs.metrics[name]) for name in shared]
    assert {*ours.gradients} == {*theirs.gradients}, {*ours.gradients} ^ {*theirs.gradients}
    largest = max(float(np.abs(g).max()) for g in theirs.gradients.values())
    gradients = [
        float(np.abs(ours.gradients[n] - g).max()) / max(float(np.abs(g).max()), 1e-3 * largest)
        for n, g in theirs.gradients.items()
    ]
    return {
        "loss": _relative(ours.loss, theirs.loss),
        "metrics": max(metrics, default=0.0),
        "gradients": max(gradients),
    }


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-3)


# Data: documents of several lengths, packed.


def pairs(count: int = 6, seed: int = 0) -> list[tuple[Answer, Answer]]:
    """Return pairs of answers to one prompt each."""
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return random.integers(3, VOCAB, random.integers(low, high)).tolist()

    prompts = [ids(2, 6) for _ in range(count)]
    return [(Answer(p, ids(2, 9)), Answer(p, ids(2, 9))) for p in prompts]


def packed(documents: list[Answer], rows: int, lead: str = "", **values: list[float]) -> Arrays:
    """Pack documents into `rows` rows in rotation, with the arrays of an ed-data loader."""
    shape = (rows, LENGTH)
    lead = f"{lead}_" if lead else ""
    batch = {f"{lead}{n}": np.zeros(shape, np.int32) for n in ("input_ids", "segment_ids")}
    batch[f"{lead}position_ids"] = np.zeros(shape, np.int32)
    batch[f"{lead}labels"] = np.full(shape, -100, np.int32)
    batch |= {name: np.full(shape, -100.0, np.float32) for name in values}
    used, segments = [0] * rows, [0] * rows
    for i, document in enumerate(documents):
        row, ids = i % rows, document.prompt + document.answer
        at = slice(used[row], used[row] + len(ids))
        used[row], segments[row] = at.stop, segments[row] + 1
        batch[f"{lead}input_ids"][row, at] = ids
        batch[f"{lead}segment_ids"][row, at] = segments[row]
        batch[f"{lead}position_ids"][row, at] = np.arange(len(ids))
        batch[f"{lead}labels"][row, at] = [-100] * len(document.prompt) + document.answer
        for name, of in values.items():
            batch[name][row, at] = of[i]
    assert max(used) <= LENGTH
    return batch


def packed_pairs(rows: int = 2, count: int = 6, seed: int = 0) -> Arrays:
    """Return the packed pairs; the two answers of a pair have the same segment number."""
    chosen, rejected = zip(*pairs(count, seed), strict=True)
    return {**packed(list(chosen), rows, "chosen"), **packed(list(rejected), rows, "rejected")}


# This project's side.


@cache
def folder(seed: int = 0, labels: int | None = None, body: bool = False) -> Path:
    """Save a tiny random model of transformers: a language model, a classifier, or a body."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = "LlamaModel" if body else "LlamaForCausalLM"
    more: dict[str, Any] = {}
    if labels is not None:
        kind, more = "LlamaForSequenceClassification", {"num_labels": labels}
    config = transformers.LlamaConfig(**SIZES, **more)
    path = Path(tempfile.mkdtemp(prefix="methods-"))
    getattr(transformers, kind)(config).save_pretrained(path)
    return path


def our_model(path: Path, task: str = "causal-language-model") -> Any:
    """Load the model of a folder in float32."""
    import jax.numpy as jnp
    from ed_infra import registry
    from ed_infra.enums import TaskType

    module = registry.get_module(TaskType(task), "llama")
    return module.from_pretrained(
        path, dtype=jnp.float32, param_dtype=jnp.float32, sharding_axis_dims=(1, 1, 1, 1, 1)
    )


def our_outcome(trainer: Any, batch: Any, *, trains: bool = False) -> Outcome:
    """Return loss, metrics and gradients of a trainer's method for one batch.

    Args:
        trainer: The trainer.
        batch: The batch of a loader.
        trains: Whether the loss has the key of a training step; otherwise it is an evaluation.
    """
    from ed_trainers import Models
    from ed_trainers.contract import build_log_metrics
    from ed_trainers.roles import value_head
    from flax import nnx
    from safetensors.numpy import load_file

    frozen = trainer.method.frozen
    graphdef, params, other = trainer.weights().model.split_module()
    prepared = trainer.prepare(batch)

    @jax.jit
    def gradient(params: Any, leaves: Any, prepared: Any) -> Any:
        def objective(params: Any) -> Any:
            models = Models(nnx.merge(graphdef, params, other), frozen.merge(leaves))
            key = jax.random.key(0) if trains else None
            loss = trainer.loss(models, prepared, key).validate_terms()
            return sum(metric.value for metric in loss.sums.values()), loss

        return jax.value_and_grad(objective, has_aux=True)(params)

    (total, loss), grads = gradient(params, frozen.leaves, prepared)
    with tempfile.TemporaryDirectory() as directory:
        whole = nnx.merge(graphdef, grads, other)
        gradients = {}
        if hasattr(whole, value_head.NAME):
            value_head.save_value_head(whole, Path(directory))
            gradients = load_file(Path(directory) / value_head.VALUE_HEAD_FILE)
            whole = value_head.without_value_head(whole)
        whole.save_pretrained(directory)
        gradients |= load_file(Path(directory) / "model.safetensors")
    terms, metrics = (
        {name: float(metric.value) for name, metric in of.items()}
        for of in (loss.sums, loss.metrics)
    )
    metrics = build_log_metrics(terms, metrics)
    assert abs(metrics["loss"] - float(total)) <= 1e-5 * max(abs(float(total)), 1.0)
    return Outcome(metrics["loss"], metrics, gradients)


def trainer_of(
    method: str,
    model: Any,
    frozen: Any = None,
    processing_class: Any = None,
    **arguments: Any,
) -> Any:
    """Return a trainer without data."""
    from ed_trainers import arguments_class, trainer_class

    options = arguments_class(method)(total_batch_size=2, **arguments)
    return trainer_class(method)(
        options, model, processing_class=processing_class, frozen=frozen or {}
    )


# TRL's side.


def tokenizer() -> Any:
    """Return a tokenizer that TRL's trainers accept; it tokenizes nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def padded(rows: list[list[int]], fill: int) -> Any:
    """Return a tensor of rows, padded on the right."""
    import torch

    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def answer_tensors(documents: list[Answer]) -> dict[str, Any]:
    """Return the tensors that TRL's collators create from documents."""
    rows = [d.prompt + d.answer for d in documents]
    return {
        "input_ids": padded(rows, 0),
        "attention_mask": padded([[1] * len(row) for row in rows], 0),
        "completion_mask": padded(
            [[0] * len(d.prompt) + [1] * len(d.answer) for d in documents], 0
        ),
    }


def hf_model(path: Path, kind: str = "CausalLM") -> Any:
    """Load the model of a folder with torch."""
    import transformers

    return getattr(transformers, f"LlamaFor{kind}").from_pretrained(path)


def config_of(cls: Any, directory: str, **options: Any) -> Any:
    """Return arguments for a trainer of TRL that writes nothing and trains on the CPU."""
    return cls(
        output_dir=directory,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=6,
        **options,
    )


def their_outcome(model: Any, loss: Any, metrics: Mapping[str, Any]) -> Outcome:
    """Differentiate the loss, and collect the metrics that TRL logged."""
    loss.backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    figures = {n: float(v[-1]) if isinstance(v, list) else float(v) for n, v in metrics.items()}
    return Outcome(loss.item(), figures, gradients)


def text_pairs(count: int = 6) -> list[dict[str, str]]:
    """Return the pairs as words of the tokenizer."""

    def words(ids: list[int]) -> str:
        return " ".join(f"t{i}" for i in ids)

    return [
        {"prompt": words(a.prompt), "chosen": words(a.answer), "rejected": words(b.answer)}
        for a, b in pairs(count)
    ]


@dataclass(frozen=True)
class Case:
    """A comparison of one variant of a method.

    Attributes:
        reference: Name of the reference.
        measure: Function that returns the errors of `loss`, `metrics` and `gradients`.
    """

    reference: str
    measure: Callable[[], dict[str, float]]
