"""Compare methods of labelled answers with TRL's trainer, and with the paper in float64."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

from tests.parity.method_cases import harness


def documents() -> tuple[list[harness.Answer], list[float]]:
    """Return answers, and 1.0 for good and 0.0 for bad answers."""
    answers = [chosen for chosen, _ in harness.pairs()]
    return answers, [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def batch_of_labels() -> Any:
    """Return the packed answers with their labels."""
    answers, labels = documents()
    return harness.packed(answers, 2, label=labels)


def kto(**options: Any) -> dict[str, float]:
    """Compare `kto` with `trl.KTOTrainer`."""
    import torch
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    path, base = harness.folder(0), harness.folder(1)
    ours = harness.trainer_of(
        "kto", harness.our_model(path), {"reference": harness.our_model(base)}, **options
    )
    answers, labels = documents()
    inputs = harness.answer_tensors(answers)
    inputs["label"] = torch.tensor(labels).bool()
    if options.get("loss_type", "kto") == "kto":
        # Ours pairs prompts and answers cyclically within a row. Documents alternate between rows.
        other = [
            harness.Answer(a.prompt, answers[(i - 2) % 6].answer) for i, a in enumerate(answers)
        ]
        inputs |= {f"KL_{name}": tensor for name, tensor in harness.answer_tensors(other).items()}
    rows = [
        {"prompt": r["prompt"], "completion": r["chosen"], "label": bool(label)}
        for r, label in zip(harness.text_pairs(), labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        model = harness.hf_model(path)
        trainer = KTOTrainer(
            model=model,
            ref_model=harness.hf_model(base),
            args=harness.config_of(KTOConfig, directory, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=harness.tokenizer(),
        )
        loss = trainer.compute_loss(model.train(), inputs)
        theirs = harness.their_outcome(model, loss, trainer._metrics["train"])
    return harness.errors(harness.our_outcome(ours, batch_of_labels()), theirs)


def bco() -> dict[str, float]:
    """Compare `bco` with equation 12 of the paper, in float64."""
    import torch
    from torch.nn.functional import logsigmoid

    beta, good_weight, bad_weight = 0.1, 1.5, 0.5
    path, base = harness.folder(0), harness.folder(1)
    ours = harness.trainer_of(
        "bco",
        harness.our_model(path),
        {"reference": harness.our_model(base)},
        beta=beta,
        desirable_weight=good_weight,
        undesirable_weight=bad_weight,
    )
    answers, labels = documents()

    def logps(model: Any) -> Any:
        tensors = harness.answer_tensors(answers)
        ids, mask = tensors["input_ids"], tensors["completion_mask"][:, 1:]
        logits = model(ids, attention_mask=tensors["attention_mask"]).logits[:, :-1]
        of_targets = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (of_targets * mask).sum(-1)

    model = harness.hf_model(path).double()
    with torch.no_grad():
        base_logps = logps(harness.hf_model(base).double())
    own = logps(model)
    rewards, good = beta * (own - base_logps), torch.tensor(labels).bool()
    shift = (rewards[good].mean() + rewards[~good].mean()).detach() / 2
    losses = torch.where(
        good, -good_weight * logsigmoid(rewards - shift), -bad_weight * logsigmoid(shift - rewards)
    )
    metrics = {
        "rewards/chosen": rewards[good].mean().item(),
        "rewards/rejected": rewards[~good].mean().item(),
        "logps/chosen": own[good].mean().item(),
        "logps/rejected": own[~good].mean().item(),
        "delta": shift.item(),
    }
    theirs = harness.their_outcome(model, losses.mean(), metrics)
    return harness.errors(harness.our_outcome(ours, batch_of_labels()), theirs)


_WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
CASES = {
    "kto": harness.Case("`trl.KTOTrainer`", partial(kto, **_WEIGHTS)),
    "kto apo_zero_unpaired": harness.Case(
        "`trl.KTOTrainer`", partial(kto, loss_type="apo_zero_unpaired")
    ),
    "bco": harness.Case("2404.04656, eq. 12, torch in float64", bco),
}
