"""Functions of `kto` and `bco`: labelled answers and their log-ratios to a reference.

Legend: b rows, s positions and slots of answers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Models, Prepared
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import learner_logps
from ed_trainers.losses.segments import Answers, last_tokens
from ed_trainers.methods.reference import ReferenceRun
from ed_trainers.placement import with_arrays


class ScoredAnswers(NamedTuple):
    """Labelled answers under the learner and the reference; float32 [b, s].

    Attributes:
        logps: log-probability of each answer under the learner.
        ratios: `logps` minus the log-probability under the reference.
        good: 1 where there is a good answer.
        bad: 1 where there is a bad answer.
    """

    logps: jax.Array
    ratios: jax.Array
    good: jax.Array
    bad: jax.Array

    def metrics(self, beta: float) -> dict[str, Metric]:
        """Return the figures of both kinds, with TRL's names; means over the answers of a kind."""
        figures = {}
        for name, answer_mask in (("chosen", self.good), ("rejected", self.bad)):
            count = jnp.sum(answer_mask)
            figures[f"rewards/{name}"] = Metric.of(jnp.sum(answer_mask * beta * self.ratios), count)
            figures[f"logps/{name}"] = Metric.of(jnp.sum(answer_mask * self.logps), count)
        return figures


def prepare_labelled(run: ReferenceRun, batch: HostBatch) -> Prepared:
    """Shift the labels of tokens; `label` by slot is 1 or 0, and -1 where there is no answer.

    Args:
        run: the run of the method.
        batch: rows with `label` float32 [b, s], 1 or 0 at the tokens of each document.

    Raises:
        ConfigError: the batch has no labels.
    """
    if "label" not in batch:
        raise ConfigError(
            f"a batch of labelled answers has label, not only {', '.join(sorted(batch))}: use "
            "rows with prompt, completion and label (true or false)"
        )
    inputs = next_token_batch(batch)
    label = np.full(inputs["input_ids"].shape, -1.0, np.float32)
    rows, columns = np.nonzero(last_tokens(inputs["segment_ids"]))
    values = np.asarray(batch["label"], np.float32)[rows, columns]
    label[rows, inputs["segment_ids"][rows, columns] - 1] = values
    return run.reference.add_logps(with_arrays(inputs, label=label))


def score_answers(
    run: ReferenceRun, models: Models, batch: Batch, key: jax.Array | None
) -> tuple[CausalLMOutput, ScoredAnswers]:
    """Return the learner's output, and the answers under both models."""
    output, token_logps = learner_logps(run, models, batch, key)
    answers = Answers.of(token_logps, batch["weights"], batch["segment_ids"])
    ratios = answers.logps - run.reference.logps(models, batch)
    label = batch["label"]
    good, bad = answers.present * (label == 1), answers.present * (label == 0)
    return output, ScoredAnswers(answers.logps, ratios, good, bad)
