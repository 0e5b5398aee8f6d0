"""REINFORCE with a leave-one-out baseline: a reward beside the mean of the others of its group.

Ahmadian et al., arXiv:2402.14740, with the clipped ratio of a whole completion as in TRL's trainer.
The divergence from the reference, summed over the tokens, is taken off the reward.

Legend: n completions, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.online.completions import Completions
from ed_trainers.online.groups import (
    GroupTrainer,
    clip_metrics,
    nanmean,
    nanstd,
    old_logps,
    row_metrics,
)
from ed_trainers.online.rewarded import Scores
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.groups import RLOOArguments
from ed_trainers.rollout import Weights

# TRL's.
_SMALL = 1e-4


class RLOOTrainer(GroupTrainer):
    """Learns from groups of completions and their rewards; `arguments` are `RLOOArguments`."""

    arguments_class: ClassVar[type[TrainingArguments]] = RLOOArguments
    arguments: RLOOArguments

    @property
    def keeps_old(self) -> bool:
        """See `GroupTrainer`; the divergence from the reference is of the old ones."""
        return super().keeps_old or self.arguments.has_reference

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """See `GroupTrainer`; the figures have the divergence of a token, `kl`."""
        rows, figures = super().rows_of(completions, weights)
        if "reference_logps" in rows:
            apart = (rows["old_logps"] - rows.pop("reference_logps")) * rows["weights"]
            figures["kl"] = float(apart.sum() / max(rows["weights"].sum(), 1))
        return rows, figures

    def advantages(self, scores: Scores, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return rewards less the mean reward of the others of their group, [n]."""
        arguments, rewards = self.arguments, scores.total
        if arguments.reward_clip_range is not None:
            rewards = np.clip(rewards, *arguments.reward_clip_range)
        if arguments.has_reference:
            apart = (rows["old_logps"] - rows["reference_logps"]) * rows["weights"]
            rewards = rewards - arguments.beta * apart.sum(-1)
        groups = rewards.reshape(-1, arguments.num_return_sequences)
        count = np.isfinite(groups).sum(-1, keepdims=True)
        others = np.nansum(groups, axis=-1, keepdims=True) - groups
        baseline = np.where(count > 1, others / np.maximum(count - 1, 1), np.nan)
        advantages = (groups - baseline).reshape(-1)
        if arguments.normalize_advantages:
            scale = nanstd(advantages) + _SMALL
            advantages = (advantages - nanmean(advantages)) / scale
        return advantages

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the clipped loss of each completion, summed over them."""
        arguments, weights = self.arguments, batch["weights"]
        output, policy = self.policy(models.learner, batch, key)
        log_ratios = (policy.logps - old_logps(batch, policy)) * weights
        ratios = jnp.exp(jnp.sum(log_ratios, axis=-1))
        lower, upper = 1 - arguments.epsilon, 1 + arguments.upper
        advantages, present = batch["advantages"], batch["present"]
        clipped = jnp.clip(ratios, lower, upper)
        losses = -jnp.minimum(ratios * advantages, clipped * advantages)
        metrics = row_metrics(batch, policy)
        metrics |= clip_metrics(ratios, advantages, present, lower, upper)
        return Loss.of(output, jnp.sum(losses * present), jnp.sum(present), **metrics)
