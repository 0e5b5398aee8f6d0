"""Binary classifier optimization: good answers against bad ones, each by itself.

Jung et al., arXiv:2404.04656, eq. 12: cross-entropy of a classifier whose score is the reward
`beta log(p / p_ref)` less a shift, half way between the mean rewards of good and of bad answers.
The paper takes a moving average of the shift. Here the shift is that of the whole step, or of the
whole evaluation, so that a step follows from its batch alone.

Legend: b rows, s slots of answers.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from jax.nn import log_sigmoid

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.methods.labelled import LabelledTrainer, Scored
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.labels import BCOArguments


class BCOTrainer(LabelledTrainer):
    """Learns to tell good answers from bad ones, near a reference; `arguments`: BCOArguments."""

    arguments_class: ClassVar[type[TrainingArguments]] = BCOArguments
    arguments: BCOArguments
    progress_columns: ClassVar[tuple[str, ...]] = (
        "loss",
        "delta",
        "rewards/chosen",
        "rewards/rejected",
    )

    def statistics(self, models: Models, batch: Batch, key: jax.Array | None) -> dict[str, Metric]:
        """Mean rewards of good and of bad answers."""
        return self._means(self.scored(models, batch, key)[1])

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the cross-entropy summed over the answers, weighted by kind."""
        arguments = self.arguments
        output, scored = self.scored(models, batch, key)
        means = {name: metric.value for name, metric in self._means(scored).items()}
        shift = sum(batch.get(name, mean) for name, mean in means.items()) / len(means)
        rewards = arguments.beta * scored.ratios - jax.lax.stop_gradient(shift)
        good = -arguments.desirable_weight * scored.good * log_sigmoid(rewards)
        bad = -arguments.undesirable_weight * scored.bad * log_sigmoid(-rewards)
        count = jnp.sum(scored.good + scored.bad)
        metrics = scored.metrics(arguments.beta)
        metrics["delta"] = Metric.of(shift * count, count)
        return Loss.of(output, jnp.sum(good + bad), count, **metrics)

    def _means(self, scored: Scored) -> dict[str, Metric]:
        figures = scored.metrics(self.arguments.beta)
        return {name: figures[name] for name in ("rewards/chosen", "rewards/rejected")}
