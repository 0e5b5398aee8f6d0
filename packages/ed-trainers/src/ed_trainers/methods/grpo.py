"""Group relative policy optimization: a completion's advantage is its reward beside its group's.

Shao et al., arXiv:2402.03300; `loss_type` and the relatives are in `GRPOArguments`. Formulas as in
TRL's trainer: the ratio is clipped as in PPO, and the divergence from the reference, estimated as
`exp(d) - d - 1`, is added to the loss of each token. Truncated importance sampling between engine
and trainer is of Yao et al. (2025).

Legend: n completions, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric

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
from ed_trainers.options.groups import GRPOArguments
from ed_trainers.rollout import Weights

# TRL's: keeps advantages finite where all rewards of a group are equal.
_SMALL = 1e-4


class GRPOTrainer(GroupTrainer):
    """Learns from groups of completions and their rewards; `arguments` are `GRPOArguments`.

    See `RewardedTrainer`, `OnlineTrainer` and `Trainer` for what it is made with.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = GRPOArguments
    arguments: GRPOArguments

    @property
    def keeps_old(self) -> bool:
        """See `GroupTrainer`; the correction compares them with the engine's."""
        return super().keeps_old or self.arguments.corrects

    @property
    def compares_samples(self) -> bool:
        """See `GroupTrainer`."""
        return self.arguments.corrects

    def advantages(self, scores: Scores, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return rewards less the mean of their group, scaled as the arguments say, [n]."""
        del rows
        arguments = self.arguments
        groups = scores.total.reshape(-1, arguments.num_return_sequences)
        advantages = groups - nanmean(groups)
        if arguments.scale_rewards == "group":
            advantages = advantages / (nanstd(groups) + _SMALL)
        elif arguments.scale_rewards == "batch":
            advantages = advantages / (nanstd(scores.total) + _SMALL)
        return advantages.reshape(-1)

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Add `correction` [n, s] to the rows of `GroupTrainer`."""
        rows, figures = super().rows_of(completions, weights)
        if not self.arguments.corrects:
            return rows, figures
        sampled = completions.at_tokens(completions.logprobs, rows["weights"].shape[1])
        own = rows.pop("sampled_logps", rows["old_logps"])
        rows["correction"], more = correction(self.arguments, own, sampled, rows["weights"])
        return rows, {**figures, **more}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over tokens or completions; see `GRPOArguments.loss_type`."""
        arguments, weights = self.arguments, batch["weights"]
        output, policy = self.policy(models.learner, batch, key)
        tokens = jnp.sum(weights, axis=-1)
        advantages = batch["advantages"][:, None]
        lower, upper = 1 - arguments.epsilon, 1 + arguments.upper

        log_ratios = (policy.logps - old_logps(batch, policy)) * weights
        if arguments.by_sequence:
            log_ratios = jnp.sum(log_ratios, axis=-1, keepdims=True)
            log_ratios = log_ratios / jnp.maximum(tokens[:, None], 1)
        ratios = jnp.exp(log_ratios)
        metrics = row_metrics(batch, policy)
        kl = None
        if arguments.has_reference:
            apart = (batch["reference_logps"] - policy.logps) * weights
            kl = jnp.exp(apart) - apart - 1
            kl = kl * ratios if arguments.use_bias_correction_kl else kl
            metrics["kl"] = Metric.of(jnp.sum(kl * weights), jnp.sum(tokens))

        spread, counted = jnp.broadcast_arrays(ratios, weights)
        if arguments.by_sequence:
            counted = jnp.where(jnp.arange(weights.shape[-1]) == 0, batch["present"][:, None], 0)
        if arguments.loss_type == "cispo":
            fixed = jax.lax.stop_gradient(jnp.minimum(ratios, arguments.upper))
            losses = -fixed * advantages * policy.logps
            clipped = ((spread > arguments.upper) & (advantages > 0)).astype(jnp.float32)
            share = Metric.of(jnp.sum(clipped * counted), jnp.sum(counted))
            metrics["cispo_clip_ratio"] = share
        else:
            bounded = ratios if arguments.delta is None else jnp.minimum(ratios, arguments.delta)
            clipped = jnp.clip(ratios, lower, upper)
            losses = -jnp.minimum(bounded * advantages, clipped * advantages)
            spread = jnp.broadcast_to(bounded, weights.shape)
            metrics |= clip_metrics(spread, advantages, counted, lower, upper)
        losses = losses * batch.get("correction", 1.0)
        if kl is not None:
            losses = losses + arguments.beta * kl
        sums = jnp.sum(losses * weights, axis=-1)
        return Loss.of(output, *self._whole(sums, tokens, batch), **metrics)

    def _whole(
        self, sums: jax.Array, tokens: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """The loss and its weight, from the sum of each completion's tokens and their number."""
        present = jnp.sum(batch["present"])
        match self.arguments.loss_type:
            case "grpo" | "gspo":
                return jnp.sum(sums / jnp.maximum(tokens, 1)), present
            case "dr_grpo":
                return jnp.sum(sums) / self.arguments.max_completion_length, present
            case "bnpo":
                return jnp.sum(sums), jnp.sum(tokens)
            case "dapo" | "cispo":
                return jnp.sum(sums), jnp.sum(batch["tokens"] * batch["present"])
        raise AssertionError(self.arguments.loss_type)


def correction(
    arguments: GRPOArguments, own: np.ndarray, sampled: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the factor of each token's loss, float32 [n, s], and figures for the log.

    Args:
        arguments: say which correction.
        own: log-probabilities of the trainer, [n, s].
        sampled: log-probabilities of the engine that sampled. Both are those of the distribution
            that was sampled from, temperature and filters included.
        weights: 1 where a token counts.
    """
    here = weights > 0
    apart = np.where(here, own - sampled, 0)
    kind, cap = arguments.importance_sampling_correction, arguments.importance_sampling_cap
    of_sequences = kind.startswith("sequence")
    if of_sequences:
        apart = np.broadcast_to(apart.sum(-1, keepdims=True), apart.shape)
    ratios = np.exp(np.minimum(apart, 80.0))
    if kind.endswith("truncate"):
        factors = np.minimum(ratios, cap)
    else:
        factors = np.where(ratios > cap, 0, ratios)
    distance = np.abs(own - sampled)[here]
    seen = factors[:, 0] if of_sequences else factors[here]
    figures = {}
    if distance.size:
        figures = {
            "sampling/sampling_logp_difference/mean": float(distance.mean()),
            "sampling/sampling_logp_difference/max": float(distance.max()),
            "sampling/importance_sampling_ratio/min": float(seen.min()),
            "sampling/importance_sampling_ratio/mean": float(seen.mean()),
            "sampling/importance_sampling_ratio/max": float(seen.max()),
        }
    return np.where(here, factors, 1).astype(np.float32), figures
