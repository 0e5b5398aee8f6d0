"""Compare methods with given targets: fine-tuning, distillation, embeddings.

The references are TRL's divergence and losses of torch in float64.
"""

from __future__ import annotations

import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.parity.method_cases import harness


def shifted(tensors: dict[str, Any]) -> tuple[Any, Any]:
    """Return the targets of the answers (-100 elsewhere), and the mask of the targets."""
    labels = tensors["input_ids"].masked_fill(tensors["completion_mask"] == 0, -100)[:, 1:]
    return labels, labels != -100


def against_cross_entropy(
    documents: list[harness.Answer], trainer: Any, batch: Any
) -> dict[str, float]:
    """Compare a trainer of the first model with torch's cross-entropy on the answers."""
    import torch

    tensors = harness.answer_tensors(documents)
    labels, _ = shifted(tensors)
    model = harness.hf_model(harness.folder(0)).double()
    logits = model(tensors["input_ids"], attention_mask=tensors["attention_mask"]).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    theirs = harness.their_outcome(model, loss, {})
    return harness.errors(harness.our_outcome(trainer, batch), theirs)


def sft() -> dict[str, float]:
    """Compare `sft` with the cross-entropy of torch."""
    documents = [chosen for chosen, _ in harness.pairs()]
    trainer = harness.trainer_of("sft", harness.our_model(harness.folder(0)))
    return against_cross_entropy(documents, trainer, harness.packed(documents, 2))


def dft() -> dict[str, float]:
    """Compare `sft` with dynamic fine-tuning of `trl.SFTTrainer`."""
    documents = [chosen for chosen, _ in harness.pairs()]
    trainer = harness.trainer_of("sft", harness.our_model(harness.folder(0)), loss_type="dft")
    with tempfile.TemporaryDirectory() as directory:
        reference, model = build_dft(directory)
        loss = reference.compute_loss(model.train(), labelled_tensors(documents))
        theirs = harness.their_outcome(model, loss, {})
    ours = harness.our_outcome(trainer, harness.packed(documents, 2), trains=True)
    return harness.errors(ours, theirs)


def build_dft(directory: str) -> tuple[Any, Any]:
    """Return a trainer of TRL with the loss of dynamic fine-tuning, and its model."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = harness.hf_model(harness.folder(0))
    trainer = SFTTrainer(
        model=model,
        args=harness.config_of(SFTConfig, directory, loss_type="dft"),
        train_dataset=Dataset.from_list([{"text": "t3"}]),
        processing_class=harness.tokenizer(),
    )
    return trainer, model


def labelled_tensors(documents: list[harness.Answer]) -> dict[str, Any]:
    """Return the tensors of documents with labels for their answers."""
    tensors = harness.answer_tensors(documents)
    labels = tensors["input_ids"].masked_fill(tensors.pop("completion_mask") == 0, -100)
    return {**tensors, "labels": labels}


def seq_kd() -> dict[str, float]:
    """Compare `seq_kd` with the cross-entropy on answers that transformers' `generate` returns."""
    import torch

    prompts = [chosen.prompt for chosen, _ in harness.pairs()]
    teacher = harness.hf_model(harness.folder(1))
    documents = []
    for prompt in prompts:
        output = teacher.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        documents.append(harness.Answer(prompt, output[0, len(prompt) :].tolist()))
    trainer = harness.trainer_of(
        "seq_kd",
        harness.our_model(harness.folder(0)),
        {"teacher": harness.our_model(harness.folder(1))},
        max_prompt_length=8,
        max_completion_length=8,
    )
    return against_cross_entropy(documents, trainer, SimpleNamespace(input_ids=prompts))


def distillation(
    alpha: float, beta: float, temperature: float, hidden: float, attention: float = 0.0
) -> dict[str, float]:
    """Compare `distillation` with `generalized_jsd_loss` of TRL's GKDTrainer, in float64."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    path, of_teacher, documents = (
        harness.folder(0),
        harness.folder(1),
        [chosen for chosen, _ in harness.pairs()],
    )
    options = {"alpha": alpha, "beta": beta, "temperature": temperature}
    trainer = harness.trainer_of(
        "distillation",
        harness.our_model(path),
        {"teacher": harness.our_model(of_teacher)},
        hidden_state_loss_weight=hidden,
        attention_loss_weight=attention,
        attention_layers=(1, 2) if attention else None,
        **options,
    )
    tensors = harness.answer_tensors(documents)
    labels, counts = shifted(tensors)
    student, teacher = harness.hf_model(path).double(), harness.hf_model(of_teacher).double()
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    for model in (student, teacher):
        model.set_attn_implementation("eager")  # only eager attention returns weights
    seen = {"output_hidden_states": True, "output_attentions": True}
    own = student(**inputs, **seen)
    with torch.no_grad():
        wanted = teacher(**inputs, **seen)
    divergence = temperature**2 * GKDTrainer.generalized_jsd_loss(
        own.logits[:, :-1], wanted.logits[:, :-1], labels, beta=beta, temperature=temperature
    )
    cross_entropy = torch.nn.functional.cross_entropy(
        own.logits[:, :-1].flatten(0, 1), labels.flatten()
    )
    layers = [
        ((a - b) ** 2)[:, :-1][counts].mean()
        for a, b in zip(own.hidden_states[1:], wanted.hidden_states[1:], strict=True)
    ]
    distance = torch.stack(layers).mean()
    apart = [
        torch.xlogy(b, b.clamp_min(1e-30) / a.clamp_min(1e-30))
        .sum(-1)
        .mean(1)[:, :-1][counts]
        .mean()
        for a, b in zip(own.attentions, wanted.attentions, strict=True)
    ]
    of_attention = torch.stack(apart).mean()
    loss = alpha * divergence + (1 - alpha) * cross_entropy + hidden * distance
    loss = loss + attention * of_attention
    metrics = {"distillation_loss": divergence.item(), "ce_loss": cross_entropy.item()}
    if hidden:
        metrics["hidden_state_loss"] = distance.item()
    if attention:
        metrics["attention_loss"] = of_attention.item()
    return harness.errors(
        harness.our_outcome(trainer, harness.packed(documents, 2)),
        harness.their_outcome(student, loss, metrics),
    )


def embedding(mode: str, **options: Any) -> dict[str, float]:
    """Compare `embedding` with InfoNCE in float64, over `LlamaModel`."""
    import torch
    import transformers

    path = harness.folder(0, body=True)
    model = harness.our_model(path, "embedding")
    from ed_models.tasks.pooling import Pooling

    model.pooling = Pooling.of(mode)
    anchors, positives = (
        [harness.Answer([], d.prompt + d.answer) for d in side]
        for side in zip(*harness.pairs(), strict=True)
    )
    batch = {**harness.packed(anchors, 2, "anchor"), **harness.packed(positives, 2, "positive")}
    ours = harness.our_outcome(harness.trainer_of("embedding", model, **options), batch)

    theirs = transformers.LlamaModel.from_pretrained(path).double()

    def embed(documents: list[harness.Answer]) -> Any:
        tensors = harness.answer_tensors(documents)
        mask = tensors["attention_mask"]
        hidden = theirs(tensors["input_ids"], attention_mask=mask).last_hidden_state
        if mode == "lasttoken":
            return hidden[torch.arange(len(documents)), mask.sum(-1) - 1]
        return (hidden * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True)

    a, p = embed(anchors), embed(positives)
    loss: Any = 0.0
    for cut, weight in zip(
        options.get("matryoshka_dims", (a.shape[-1],)),
        options.get("matryoshka_weights", (1.0,)),
        strict=True,
    ):
        cosines = torch.nn.functional.normalize(a[:, :cut], dim=-1) @ (
            torch.nn.functional.normalize(p[:, :cut], dim=-1).T
        )
        temperatures = options.get("temperature", (0.05,))
        ways = [cosines, cosines.T] if options.get("symmetric") else [cosines]
        parts = [
            torch.nn.functional.cross_entropy(way / t, torch.arange(len(anchors)))
            for way in ways
            for t in temperatures
        ]
        loss = loss + weight * sum(parts) / len(parts)
    accuracy = (cosines.argmax(-1) == torch.arange(len(anchors))).double().mean()
    return harness.errors(ours, harness.their_outcome(theirs, loss, {"accuracy": accuracy}))


_GKD = "`trl.experimental.gkd.GKDTrainer`'s divergence, torch in float64"
_FORWARD = {"alpha": 0.9, "beta": 0.0, "temperature": 2.0, "hidden": 0.0}
CASES = {
    "sft": harness.Case("`torch`'s cross-entropy in float64", sft),
    "sft dft": harness.Case("`trl.SFTTrainer`", dft),
    "seq_kd": harness.Case(
        "greedy answers of `transformers`, `torch`'s cross-entropy in float64", seq_kd
    ),
    "distillation forward": harness.Case(_GKD, partial(distillation, **_FORWARD)),
    "distillation reverse": harness.Case(_GKD, partial(distillation, **{**_FORWARD, "beta": 1.0})),
    "distillation Jensen-Shannon, hidden states": harness.Case(
        _GKD, partial(distillation, alpha=0.5, beta=0.3, temperature=1.5, hidden=0.7)
    ),
    "distillation attention": harness.Case(
        "2002.10957, eq. 5, torch in float64",
        partial(distillation, **_FORWARD, attention=0.8),
    ),
    "embedding": harness.Case("1807.03748, torch in float64", partial(embedding, "lasttoken")),
    "embedding Matryoshka, temperatures, symmetric": harness.Case(
        "1807.03748, 2205.13147, torch in float64",
        partial(
            embedding,
            "mean",
            temperature=(0.05, 0.2),
            symmetric=True,
            matryoshka_dims=(8, 16, 32),
            matryoshka_weights=(0.5, 0.25, 1.0),
        ),
    ),
}
