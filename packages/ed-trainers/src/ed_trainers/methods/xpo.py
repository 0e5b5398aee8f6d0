"""Exploratory preference optimization: the learner's completions against the reference's.

Xie et al., arXiv:2405.21046, algorithm 1: the loss of `dpo` on the pair, the winner chosen; and
`alpha` times the log-probability of the reference's completion, which pushes the learner off what
the reference knows. Names as in TRL's trainer, which takes a tie for a win.

Legend: n prompts, b rows, s positions.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.pairs import as_rows, pair_metrics, smoothed
from ed_trainers.online.completions import Completions
from ed_trainers.online.self_play import SelfPlayTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.self_play import XPOArguments
from ed_trainers.rollout import Weights

_ROWS = ("input_ids", "segment_ids", "position_ids", "targets", "weights")


class XPOTrainer(SelfPlayTrainer):
    """Learns which of two completions is better, its own or the reference's, and to explore."""

    arguments_class: ClassVar[type[TrainingArguments]] = XPOArguments
    arguments: XPOArguments
    progress_columns: ClassVar[tuple[str, ...]] = ("reward", "rewards/won", "objective/kl", "loss")

    def opponent(self, models: Models) -> object:
        """The reference."""
        return models["reference"]

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Make pairs [n, 2, s], the learner's completion first.

        With `reference_logps` [n, 2, s]; `won` and `lost` [n], 1 where the learner's is the better
        or the worse one. Neither in a tie: then only the exploration is learned from.
        """
        contest = self.contest(completions, weights)
        sides = contest.own, contest.other
        rows = {name: np.stack([side[name] for side in sides], axis=1) for name in _ROWS}
        rows |= self.compute(self.reference_says, rows, weights)
        rows["won"] = (contest.wins > 0.5).astype(np.float32)
        rows["lost"] = (contest.wins < 0.5).astype(np.float32)
        rows["present"] = np.ones_like(contest.wins)
        rows |= contest.scored
        return rows, contest.figures

    def reference_says(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """Log-probabilities of the tokens of pairs under the reference."""
        _, policy = self.policy(models["reference"], as_rows(batch))
        return {"reference_logps": policy.logps.reshape(batch["targets"].shape)}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over the pairs."""
        arguments, weights = self.arguments, batch["weights"]
        rows = as_rows({name: batch[name] for name in _ROWS})
        output, policy = self.policy(models.learner, rows, key)
        logps = jnp.sum(weights * policy.logps.reshape(weights.shape), axis=-1)
        ratios = logps - jnp.sum(weights * batch["reference_logps"], axis=-1)

        def by_winner(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            own, other = values[:, 0], values[:, 1]
            won = batch["won"] > 0
            return jnp.where(won, own, other), jnp.where(won, other, own)

        chosen, rejected = by_winner(ratios)
        difference = chosen - rejected
        if arguments.loss_type == "ipo":
            of_pairs = (difference - 1 / (2 * arguments.beta)) ** 2
        else:
            of_pairs = smoothed(arguments.beta * difference, 0.0)
        explored = arguments.alpha * logps[:, 1]
        present, decided = batch["present"], batch["won"] + batch["lost"]
        pairs = jnp.sum(present)
        figures = {
            "loss/dpo": decided * of_pairs,
            "loss/xpo": explored,
            "objective/kl": ratios[:, 0],
            "objective/entropy": -logps[:, 0],
        }
        metrics = {name: Metric.of(jnp.sum(present * x), pairs) for name, x in figures.items()}
        if "rewards" in batch:
            reward = jnp.sum(batch["scored"] * batch["rewards"]), jnp.sum(batch["scored"])
            metrics["reward"] = Metric.of(*reward)
        metrics["rewards/won"] = Metric.of(jnp.sum(batch["won"]), jnp.sum(decided))
        rewards = (arguments.beta * chosen, arguments.beta * rejected)
        metrics |= pair_metrics(decided, rewards, by_winner(logps))
        total = jnp.sum(present * (decided * of_pairs + explored))
        return Loss.of(output, total, pairs, **metrics)
