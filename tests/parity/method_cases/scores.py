"""Compare methods that train a scorer with TRL's trainer, and with torch in float64."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import numpy as np

from tests.parity.method_cases import harness

MARGINS = [0.0, 0.5, 1.0, 0.0, 2.0, 0.25]


def reward(coefficient: float | None, margins: bool) -> dict[str, float]:
    """Compare `reward` with `trl.RewardTrainer`."""
    import torch
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    path = harness.folder(0, labels=1)
    ours = harness.trainer_of(
        "reward",
        harness.our_model(path, "sequence-classification"),
        center_rewards_coefficient=coefficient,
    )
    chosen, rejected = zip(*harness.pairs(), strict=True)
    values: dict[str, Any] = {"margin": MARGINS} if margins else {}
    batch = {
        **harness.packed(list(chosen), 2, "chosen"),
        **harness.packed(list(rejected), 2, "rejected"),
        **{name: harness.packed(list(chosen), 2, **values)[name] for name in values},
    }
    with tempfile.TemporaryDirectory() as directory:
        model = harness.hf_model(path, "SequenceClassification")
        trainer = RewardTrainer(
            model=model,
            args=harness.config_of(RewardConfig, directory, center_rewards_coefficient=coefficient),
            train_dataset=Dataset.from_list(harness.text_pairs()),
            processing_class=harness.tokenizer(),
        )
        inputs = harness.answer_tensors([*chosen, *rejected])
        del inputs["completion_mask"]
        if margins:
            inputs["margin"] = torch.tensor(MARGINS)
        loss = trainer.compute_loss(model.train(), inputs)
        theirs = harness.their_outcome(model, loss, trainer._metrics["train"])
    return harness.errors(harness.our_outcome(ours, batch), theirs)


def prm() -> dict[str, float]:
    """Compare `prm` with torch's cross-entropy in float64, with each document in a separate row."""
    import torch

    path = harness.folder(0, labels=2)
    ours = harness.trainer_of("prm", harness.our_model(path, "sequence-classification"))
    documents = [chosen for chosen, _ in harness.pairs()]
    labels = [float(i % 2) for i in range(len(documents))]
    batch = dict(harness.packed(documents, 2, step_labels=labels))
    # One step ends at the last token, and another one two tokens earlier.
    segments, wanted = batch["segment_ids"], np.full(batch["step_labels"].shape, -100.0)
    for row, column in zip(*np.nonzero(segments), strict=True):
        here = np.flatnonzero(segments[row] == segments[row, column])
        if column in (here[-1], here[-3]):
            wanted[row, column] = batch["step_labels"][row, column] == (column == here[-1])
    batch["step_labels"] = wanted.astype(np.float32)

    model = harness.hf_model(path, "SequenceClassification").double()
    tensors = harness.answer_tensors(documents)
    hidden = model.model(tensors["input_ids"], attention_mask=tensors["attention_mask"])
    scores = model.score(hidden.last_hidden_state)
    logits, targets = [], []
    for i, document in enumerate(documents):
        end = len(document.prompt) + len(document.answer) - 1
        logits += [scores[i, end], scores[i, end - 2]]
        targets += [int(labels[i]), int(not labels[i])]
    found, answers = torch.stack(logits), torch.tensor(targets)
    loss = torch.nn.functional.cross_entropy(found, answers)
    accuracy = (found.argmax(-1) == answers).double().mean()
    return harness.errors(
        harness.our_outcome(ours, batch), harness.their_outcome(model, loss, {"accuracy": accuracy})
    )


CASES = {
    "reward": harness.Case("`trl.RewardTrainer`", partial(reward, None, margins=False)),
    "reward centered, margins": harness.Case(
        "`trl.RewardTrainer`", partial(reward, 0.1, margins=True)
    ),
    "prm": harness.Case("2305.20050, torch in float64", prm),
}
