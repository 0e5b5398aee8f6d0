"""`GroupTrainer`: what the methods share that compare several completions of a prompt.

Legend: n completions, s positions, p prompts, g completions of a prompt (n = p g).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Models
from ed_trainers.losses.policy import Policy
from ed_trainers.online.completions import Completions
from ed_trainers.online.feed import Generation
from ed_trainers.online.rewarded import RewardedTrainer, Scores
from ed_trainers.online.trainer import HELD_OUT
from ed_trainers.options.groups import GroupArguments
from ed_trainers.rollout import Weights

#: Steps in a row without a difference between the rewards of any group, after which a warning says
#: so.
EQUAL_STEPS = 10


class GroupTrainer(RewardedTrainer):
    """Makes rows with an advantage each."""

    _equal_steps = 0

    arguments: GroupArguments
    progress_columns: ClassVar[tuple[str, ...]] = (
        "reward",
        "kl",
        "completions/mean_length",
        "loss",
    )

    @property
    def keeps_old(self) -> bool:
        """Whether the log-probabilities before the steps are computed ahead of them.

        One step on each generation needs none: then the step's own are the old ones.
        """
        return self.arguments.updates_per_generation > 1

    @property
    def compares_samples(self) -> bool:
        """Whether the rollout's log-probabilities are compared with the trainer's."""
        return False

    def generate(self, batch: HostBatch, weights: Weights, number: int) -> Generation:
        """See `OnlineTrainer.generate`; warn where the rewards teach nothing for many steps."""
        made = super().generate(batch, weights, number)
        if number == HELD_OUT:
            return made
        before, steps = self._equal_steps, self.arguments.updates_per_generation
        equal = made.figures["frac_reward_zero_std"] == 1
        self._equal_steps = before + steps if equal else 0
        if before < EQUAL_STEPS <= self._equal_steps and jax.process_index() == 0:
            print(_equal_rewards(made.rows["rewards"], self._equal_steps), flush=True)
        return made

    @abstractmethod
    def advantages(self, scores: Scores, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the advantage of each completion, [n], NaN where it has no reward.

        Args:
            scores: of the completions.
            rows: with what `policies` says.
        """

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Make rows, each with `advantages` [n] and what models say; see `OnlineTrainer`.

        `present` [n] is 1, `tokens` [n] the mean number of tokens that count, over the generation.
        """
        rows = completions.rows(self.arguments.row_length)
        if self.arguments.mask_truncated_completions:
            rows["weights"] *= np.asarray(completions.ended, np.float32)[:, None]
        rows |= self.compute(self.policies, rows, weights) if self._asks else {}
        scores = self.score(completions, rows, weights)
        known = np.isfinite(scores.total)
        advantages = self.advantages(scores, rows)
        count = len(completions)
        groups = scores.total.reshape(-1, self.arguments.num_return_sequences)
        figures = scores.figures()
        figures["frac_reward_zero_std"] = float(np.mean(nanstd(groups) < 1e-8))
        rows |= {
            "advantages": np.where(known, np.nan_to_num(advantages), 0).astype(np.float32),
            "rewards": np.where(known, scores.total, 0).astype(np.float32),
            "scored": known.astype(np.float32),
            "present": np.ones(count, np.float32),
            "tokens": np.full(count, rows["weights"].sum() / count, np.float32),
        }
        return rows, figures

    @property
    def _asks(self) -> bool:
        return self.keeps_old or self.arguments.has_reference

    def policies(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """Return `old_logps` and `reference_logps` [n, s] of rows, where they are read.

        Where samples are compared and the sampling has filters, also `sampled_logps`: the same
        forward pass gives them.
        """
        out = {}
        if self.keeps_old:
            _, own = self.policy(models.learner, batch, truncated=self.compares_samples)
            out["old_logps"] = own.logps
            if own.sampled_logps is not None:
                out["sampled_logps"] = own.sampled_logps
        if self.arguments.has_reference:
            out["reference_logps"] = self.policy(models["reference"], batch)[1].logps
        return out


def _equal_rewards(rewards: np.ndarray, steps: int) -> str:
    """The warning about groups whose completions all have the same reward."""
    seen = ", ".join(f"{value:g}" for value in np.unique(rewards)[:3])
    return (
        f"warning: for {steps} steps in a row, all completions of each prompt had equal rewards "
        f"(the last ones: {seen}). The advantages are 0, so the model learns nothing from them. "
        "Check that the reward functions read the completions in the shape they get (with chat "
        "prompts a completion is a list of messages), that the task is neither too hard nor "
        "solved, that max_completion_length is long enough, and that temperature is high enough "
        "for completions to differ"
    )


def old_logps(batch: Batch, policy: Policy) -> jax.Array:
    """Log-probabilities before the steps of a generation; see `GroupTrainer.keeps_old`."""
    return batch.get("old_logps", jax.lax.stop_gradient(policy.logps))


def row_metrics(batch: Batch, policy: Policy) -> dict[str, Metric]:
    """The reward of the rows, and the entropy of their tokens."""
    weights, scored = batch["weights"], batch["scored"]
    return {
        "reward": Metric.of(jnp.sum(batch["rewards"] * scored), jnp.sum(scored)),
        "entropy": Metric.of(jnp.sum(policy.entropy * weights), jnp.sum(weights)),
    }


def clip_metrics(
    ratios: jax.Array, advantages: jax.Array, weights: jax.Array, lower: float, upper: float
) -> dict[str, Metric]:
    """Shares of the ratios that are clipped, with TRL's names; all arrays of one shape."""
    low = ((ratios < lower) & (advantages < 0)).astype(jnp.float32)
    high = ((ratios > upper) & (advantages > 0)).astype(jnp.float32)
    total = jnp.sum(weights)
    return {
        "clip_ratio/low_mean": Metric.of(jnp.sum(low * weights), total),
        "clip_ratio/high_mean": Metric.of(jnp.sum(high * weights), total),
        "clip_ratio/region_mean": Metric.of(jnp.sum((low + high) * weights), total),
    }


def nanmean(values: np.ndarray) -> np.ndarray:
    """Mean along the last axis of what is no NaN, kept as an axis; NaN where all are."""
    here = np.isfinite(values)
    count = here.sum(-1, keepdims=True)
    total = np.where(here, values, 0).sum(-1, keepdims=True, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def nanstd(values: np.ndarray) -> np.ndarray:
    """Standard deviation, as `nanmean`, of a sample (divided by one less than their number)."""
    here = np.isfinite(values)
    count = here.sum(-1, keepdims=True)
    squares = np.where(here, values - nanmean(values), 0) ** 2
    variance = squares.sum(-1, keepdims=True) / np.maximum(count - 1, 1)
    return np.where(count > 1, np.sqrt(variance), np.nan)
