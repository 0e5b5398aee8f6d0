"""Compare methods that train encoder-decoders with T5 of transformers on torch in float64.

Our documents share rows; on torch each document has a separate row.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.method_cases import encoders, harness

SIZES: dict[str, Any] = {
    "vocab_size": harness.VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


@cache
def folder(seed: int = 0) -> Path:
    """Save a tiny random T5."""
    import torch
    import transformers

    torch.manual_seed(seed)
    path = Path(tempfile.mkdtemp(prefix="encoder-decoders-"))
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES))
    with torch.no_grad():
        model.shared.weight.mul_(0.5)  # logits of the usual size
    model.save_pretrained(path)
    return path


def our_model(seed: int = 0) -> Any:
    """Load the model in float32."""
    from ed_infra import registry
    from ed_infra.enums import TaskType

    module = registry.get_module(TaskType.SEQUENCE_TO_SEQUENCE, "t5")
    return module.from_pretrained(folder(seed), sharding_axis_dims=(1, 1, 1, 1, 1))


def their_model(seed: int = 0) -> Any:
    """Load the model with torch in float64."""
    import transformers

    return transformers.T5ForConditionalGeneration.from_pretrained(folder(seed)).eval().double()


def tokenizer() -> Any:
    """Return the tokenizer with sentinels."""
    made = harness.tokenizer()
    names = [f"<extra_id_{i}>" for i in range(8)]
    vocabulary = made.get_vocab() | {name: harness.VOCAB - 1 - i for i, name in enumerate(names)}
    made.get_vocab = lambda: vocabulary
    return made


def span_corruption() -> dict[str, float]:
    """Compare `span_corruption` with T5 on the corrupted batch."""
    trainer = harness.trainer_of(
        "span_corruption",
        our_model(),
        processing_class=tokenizer(),
        noise_density=0.3,
        mean_noise_span_length=2.0,
    )
    documents = [harness.Answer(a.prompt, [*a.answer, 2]) for a, _ in harness.pairs()]
    batch = harness.packed(documents, 2)
    prepared = trainer.prepare(batch)
    labels = np.where(prepared["weights"] > 0, prepared["targets"], -100)
    sources = list(encoders.places(np.asarray(prepared["segment_ids"])))
    targets = list(encoders.places(np.asarray(prepared["decoder_segment_ids"])))
    assert len(sources) == len(targets) == len(documents)
    model = their_model()
    loss = model(
        input_ids=harness.padded([prepared["input_ids"][r, at].tolist() for r, at in sources], 0),
        attention_mask=harness.padded([[1] * len(at) for _, at in sources], 0),
        labels=harness.padded([labels[r, at].tolist() for r, at in targets], -100),
    ).loss
    return harness.errors(
        harness.our_outcome(trainer, batch), harness.their_outcome(model, loss, {})
    )


def dpo(loss_type: str, **options: Any) -> dict[str, float]:
    """Compare `dpo` of an encoder-decoder with log-probabilities of T5."""
    import torch
    from torch.nn.functional import logsigmoid

    found = harness.pairs()
    prompts = [harness.Answer([], chosen.prompt) for chosen, _ in found]
    sides = {
        name: [harness.Answer([], pair[i].answer) for pair in found]
        for i, name in enumerate(("chosen", "rejected"))
    }
    batch = dict(harness.packed(prompts, 2))
    del batch["labels"]
    for name, documents in sides.items():
        batch |= harness.packed(documents, 2, name)
    trainer = harness.trainer_of(
        "dpo", our_model(), {"reference": our_model(1)}, loss_type=loss_type, **options
    )
    source = harness.answer_tensors(prompts)

    def logps(model: Any, documents: list[harness.Answer]) -> tuple[Any, Any]:
        labels = harness.padded([d.answer for d in documents], -100)
        logits = model(
            input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=labels
        ).logits
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        here = labels >= 0
        return (chosen * here).sum(-1), here.sum(-1)

    model, reference, beta = their_model(), their_model(1), options.get("beta", 0.1)
    ratios, own = [], []
    for documents in sides.values():
        learned, count = logps(model, documents)
        with torch.no_grad():
            fixed, _ = logps(reference, documents)
        own.append(learned)
        ratios.append((learned - fixed) / (count if loss_type == "ipo" else 1))
    difference = ratios[0] - ratios[1]
    loss = (
        (difference - 1 / (2 * beta)) ** 2 if loss_type == "ipo" else -logsigmoid(beta * difference)
    )
    metrics = {"logps/chosen": own[0].mean().item(), "logps/rejected": own[1].mean().item()}
    return harness.errors(
        harness.our_outcome(trainer, batch), harness.their_outcome(model, loss.mean(), metrics)
    )


_T5 = "`T5ForConditionalGeneration` of transformers, torch in float64"
CASES = {
    "span_corruption": harness.Case(_T5, span_corruption),
    "dpo of an encoder-decoder": harness.Case(_T5, partial(dpo, "sigmoid")),
    "dpo of an encoder-decoder, ipo": harness.Case(_T5, partial(dpo, "ipo", beta=0.3)),
}
