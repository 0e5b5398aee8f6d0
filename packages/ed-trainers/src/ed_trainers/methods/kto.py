"""Kahneman-Tversky optimization: good and bad answers, each by itself, against a reference point.

Ethayarajh et al., arXiv:2402.01306, eqs. 7 and 8. The reference point, the divergence from the
reference, is estimated as in TRL's trainer: the mean log-ratio of prompts with answers to other
prompts, of the whole step, at least 0, without gradient.

Legend: b rows, s positions, and slots of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric
from jax.nn import sigmoid

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.feed import HostBatch
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.methods.labelled import LabelledTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.labels import KTOArguments

_OTHER = "other_"


class KTOTrainer(LabelledTrainer):
    """Learns to write good answers and not bad ones; `arguments` are `KTOArguments`."""

    arguments_class: ClassVar[type[TrainingArguments]] = KTOArguments
    arguments: KTOArguments

    @property
    def whole_batches(self) -> bool:
        """Answers go from row to row, where the loss has a reference point."""
        return super().whole_batches or self.arguments.loss_type == "kto"

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Add `other_*`: the same prompts, each with the answer to another one."""
        made = super().prepare(batch)
        if self.arguments.loss_type != "kto":
            return made
        other = self.with_reference(next_token_batch(mismatched(made, batch)))
        return made | {f"{_OTHER}{name}": array for name, array in other.items()}

    def statistics(self, models: Models, batch: Batch, key: jax.Array | None) -> dict[str, Metric]:
        """The mean log-ratio of prompts with answers to other prompts, `kl`."""
        if self.arguments.loss_type != "kto":
            return {}
        other = {n.removeprefix(_OTHER): x for n, x in batch.items() if n.startswith(_OTHER)}
        _, logps = target_logps(
            models.learner,
            other,
            key,
            placement=self.placement,
            chunk=self.arguments.lmhead_chunksize,
            noise=self.arguments.neftune_noise_alpha,
        )
        own = Answers.of(logps, other["weights"], other["segment_ids"])
        ratios = jax.lax.stop_gradient(own.logps) - self.reference_logps(models, other)
        return {"kl": Metric.of(jnp.sum(own.present * ratios), jnp.sum(own.present))}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over the answers, weighted by kind."""
        arguments, beta = self.arguments, self.arguments.beta
        output, scored = self.scored(models, batch, key)
        count = jnp.sum(scored.good + scored.bad)
        metrics = scored.metrics(beta)
        if arguments.loss_type == "kto":
            kl = batch["kl"] if "kl" in batch else self.statistics(models, batch, key)["kl"].value
            kl = jax.lax.stop_gradient(jnp.maximum(kl, 0.0))
            good = 1 - sigmoid(beta * (scored.ratios - kl))
            bad = 1 - sigmoid(beta * (kl - scored.ratios))
            metrics["kl"] = Metric.of(kl * count, count)
        else:
            good, bad = 1 - sigmoid(beta * scored.ratios), sigmoid(beta * scored.ratios)
        good = arguments.desirable_weight * scored.good * good
        bad = arguments.undesirable_weight * scored.bad * bad
        return Loss.of(output, jnp.sum(good + bad), count, **metrics)


def mismatched(made: Mapping[str, np.ndarray], batch: HostBatch) -> dict[str, np.ndarray]:
    """Return rows of the same prompts with other answers: each that of the document before it.

    Answers go round within a row, which stays as long as it is; the document of a row that has one
    only takes the last answer of the row before, cut at the end of the row.

    Args:
        made: `input_ids`, `segment_ids`, `weights` [b, s].
        batch: perhaps with `labels`, which say where an answer begins.
    """
    ids, segments = made["input_ids"], made["segment_ids"]
    answered = np.asarray(batch.get("labels", ids)) != -100
    documents = [
        [
            (row[here & ~is_answer], row[here & is_answer])
            for number in range(1, int(numbers.max(initial=0)) + 1)
            for here in [numbers == number]
        ]
        for row, numbers, is_answer in zip(ids, segments, answered, strict=True)
    ]
    filled = [inside for inside in documents if inside]
    out = {name: np.zeros_like(ids) for name in ("input_ids", "segment_ids", "position_ids")}
    out["labels"] = np.full_like(ids, -100)
    before = filled[-1][-1][1] if filled else None
    for row, inside in enumerate(documents):
        used = 0
        for number, (prompt, _) in enumerate(inside):
            answer = inside[number - 1][1] if len(inside) > 1 else before
            assert answer is not None
            text = np.concatenate([prompt, answer])[: ids.shape[1] - used]
            at = slice(used, used + len(text))
            used = at.stop
            out["input_ids"][row, at] = text
            out["segment_ids"][row, at] = number + 1
            out["position_ids"][row, at] = np.arange(len(text))
            out["labels"][row, at] = np.where(np.arange(len(text)) < len(prompt), -100, text)
        if inside:
            before = inside[-1][1]
    return out
