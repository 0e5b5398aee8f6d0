"""What `kto` and `bco` share: answers with a label, and their log-ratios to a reference.

Legend: b rows, s positions, and slots of answers.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Models
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers, last_tokens
from ed_trainers.methods.reference import ReferenceTrainer
from ed_trainers.options.labels import LabelledArguments


class Scored(NamedTuple):
    """Labelled answers under the learner and the reference; float32 [b, s].

    Attributes:
        logps: log-probability of each answer under the learner.
        ratios: the same, less that under the reference.
        good: 1 where there is a good answer.
        bad: 1 where there is a bad answer.
    """

    logps: jax.Array
    ratios: jax.Array
    good: jax.Array
    bad: jax.Array

    def metrics(self, beta: float) -> dict[str, Metric]:
        """The figures of both kinds, with TRL's names; means over the answers of a kind."""
        figures = {}
        for name, here in (("chosen", self.good), ("rejected", self.bad)):
            count = jnp.sum(here)
            figures[f"rewards/{name}"] = Metric.of(jnp.sum(here * beta * self.ratios), count)
            figures[f"logps/{name}"] = Metric.of(jnp.sum(here * self.logps), count)
        return figures


class LabelledTrainer(ReferenceTrainer):
    """A trainer on batches with `label` float32 [b, s], 1 or 0 at the tokens of each document."""

    arguments: LabelledArguments
    per_token: ClassVar[bool] = False

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Shift the labels of tokens; `label` is by slot, 1 or 0, -1 where there is no answer.

        Raises:
            ConfigError: there are no labels.
        """
        if "label" not in batch:
            raise ConfigError(
                f"a batch of labelled answers has label, not only {', '.join(sorted(batch))}: give "
                "rows with prompt, completion and label (true or false)"
            )
        made = next_token_batch(batch)
        label = np.full(made["input_ids"].shape, -1.0, np.float32)
        rows, columns = np.nonzero(last_tokens(made["segment_ids"]))
        values = np.asarray(batch["label"], np.float32)[rows, columns]
        label[rows, made["segment_ids"][rows, columns] - 1] = values
        return self.with_reference({**made, "label": label})

    def scored(
        self, models: Models, batch: Batch, key: jax.Array | None
    ) -> tuple[CausalLMOutput, Scored]:
        """Return the learner's output, and the answers under both models."""
        output, token_logps = target_logps(
            models.learner,
            batch,
            key,
            placement=self.placement,
            chunk=self.arguments.lmhead_chunksize,
            noise=self.arguments.neftune_noise_alpha,
        )
        own = Answers.of(token_logps, batch["weights"], batch["segment_ids"])
        ratios = own.logps - self.reference_logps(models, batch)
        label = batch["label"]
        good, bad = own.present * (label == 1), own.present * (label == 0)
        return output, Scored(own.logps, ratios, good, bad)
