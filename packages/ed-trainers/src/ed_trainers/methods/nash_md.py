"""Nash learning from human feedback: the learner's completions against those of a mixture.

Munos et al., arXiv:2312.00886, Nash-MD-PG (section 8): the opponent is the geometric mixture of
the learner and the reference, and the gradient is that of the log-probability of the learner's
completion, times how much likelier than not it wins, less `beta` times its log-ratio to the
reference.

Legend: n prompts, b rows, s positions.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.online.completions import Completions
from ed_trainers.online.groups import row_metrics
from ed_trainers.online.mixture import GeometricMixture
from ed_trainers.online.self_play import SelfPlayTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.self_play import NashMDArguments
from ed_trainers.rollout import Weights


class NashMDTrainer(SelfPlayTrainer):
    """Learns to win against a mixture of itself and the reference; `arguments`: NashMDArguments."""

    arguments_class: ClassVar[type[TrainingArguments]] = NashMDArguments
    arguments: NashMDArguments
    progress_columns: ClassVar[tuple[str, ...]] = (
        "reward",
        "rewards/accuracies",
        "objective/kl",
        "loss",
    )

    def opponent(self, models: Models) -> object:
        """The mixture."""
        return GeometricMixture(models.learner, models["reference"], self.arguments.mixture_coef)

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Make rows of the learner's completions.

        With `reference_logps` [n, s], `wins` [n], the probability that the completion is the better
        one, and `present` [n], 1 where anything says so.
        """
        contest = self.contest(completions, weights)
        rows = {**contest.own, **contest.scored}
        rows |= self.compute(self.reference_says, rows, weights)
        known = np.isfinite(contest.wins)
        rows["wins"] = np.where(known, contest.wins, 0).astype(np.float32)
        rows["present"] = known.astype(np.float32)
        return rows, contest.figures

    def reference_says(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """Log-probabilities of the tokens of rows under the reference."""
        return {"reference_logps": self.policy(models["reference"], batch)[1].logps}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over the completions; its gradient counts, not its value."""
        weights, wins = batch["weights"], batch["wins"]
        output, policy = self.policy(models.learner, batch, key)
        logps = jnp.sum(weights * policy.logps, axis=-1)
        ratios = jax.lax.stop_gradient(logps) - jnp.sum(weights * batch["reference_logps"], axis=-1)
        score = (wins - 0.5) * logps
        divergence = self.arguments.beta * ratios * logps
        present = batch["present"]
        count = jnp.sum(present)
        figures = {
            "loss/score": score,
            "loss/kl": divergence,
            "objective/kl": ratios,
            "objective/entropy": -logps,
            "rewards/probabilities": wins,
            "rewards/accuracies": (wins > 0.5).astype(jnp.float32),
        }
        metrics = {name: Metric.of(jnp.sum(present * x), count) for name, x in figures.items()}
        if "rewards" in batch:
            metrics |= row_metrics(batch, policy)
        return Loss.of(output, jnp.sum(present * (divergence - score)), count, **metrics)
