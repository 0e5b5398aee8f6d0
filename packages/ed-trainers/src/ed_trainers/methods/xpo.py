"""Exploratory preference optimization: the learner's completions against the reference's.

Xie et al., arXiv:2405.21046, algorithm 1: the loss of `dpo` on the pair with the winner as the
chosen answer, and `alpha` times the log-probability of the reference's completion, which moves the
learner away from the completions of the reference. Names as in TRL's trainer, which counts a tie as
a win.

Legend: n prompts, b rows, s positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.contract import A, Batch, Loss, Models
from ed_trainers.losses.pairs import as_rows, compute_smoothed_losses, get_pair_axes, pair_metrics
from ed_trainers.methods.reference import Reference
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import OnlineRun, PhaseRows, compute_policy, online_method
from ed_trainers.online.self_play import Referee
from ed_trainers.options.online import XPOArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer

_ROWS = ("input_ids", "segment_ids", "position_ids", "targets", "weights")


class SelfPlayRun(OnlineRun[A]):
    """A run of a method that compares completions of two policies."""

    referee: Referee
    reference: Reference

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.referee = Referee(self, models)
        self.reference = Reference(self, models)
        super().create_parts(models)


def _opponent(models: Models) -> object:
    """Return the reference."""
    return models["reference"]


def rows(
    run: SelfPlayRun[XPOArguments], completions: Completions, weights: Weights, number: int
) -> PhaseRows:
    """Return pairs [n, 2, s], the learner's completion first, with `reference_logps` [n, 2, s].

    `won` and `lost` [n] are 1 where the learner's completion is better or worse. In a tie both are
    0, and only the exploration is trained.
    """
    del number
    contest = run.referee.contest(completions, weights, _opponent)
    sides = contest.learner_rows, contest.opponent_rows
    row_arrays = {name: np.stack([side[name] for side in sides], axis=1) for name in _ROWS}
    row_arrays |= run.phase.ask(_reference_logps, row_arrays, weights)
    row_arrays["won"] = (contest.wins > 0.5).astype(np.float32)
    row_arrays["lost"] = (contest.wins < 0.5).astype(np.float32)
    row_arrays["present"] = np.ones_like(contest.wins)
    row_arrays |= contest.scored
    return row_arrays, contest.figures


def _reference_logps(
    run: SelfPlayRun[XPOArguments], models: Models, batch: Batch
) -> dict[str, jax.Array]:
    """Return the log-probabilities of the tokens of pairs under the reference."""
    _, policy = compute_policy(run, models["reference"], as_rows(batch))
    return {"reference_logps": policy.logps.reshape(batch["targets"].shape)}


def loss(
    run: SelfPlayRun[XPOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the loss summed over the pairs."""
    arguments, weights = run.arguments, batch["weights"]
    pairs = as_rows(batch.select(_ROWS))
    output, policy = compute_policy(run, models.learner, pairs, key)
    logps = jnp.sum(weights * policy.logps.reshape(weights.shape), axis=-1)
    ratios = logps - jnp.sum(weights * batch["reference_logps"], axis=-1)

    def by_winner(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        learner_values, opponent_values = values[:, 0], values[:, 1]
        won = batch["won"] > 0
        return jnp.where(won, learner_values, opponent_values), jnp.where(
            won, opponent_values, learner_values
        )

    chosen, rejected = by_winner(ratios)
    difference = chosen - rejected
    if arguments.loss_type == "ipo":
        preference_losses = (difference - 1 / (2 * arguments.beta)) ** 2
    else:
        preference_losses = compute_smoothed_losses(arguments.beta * difference, 0.0)
    explored = arguments.alpha * logps[:, 1]
    present, decided = batch["present"], batch["won"] + batch["lost"]
    count = jnp.sum(present)
    figures = {
        "loss/dpo": decided * preference_losses,
        "loss/xpo": explored,
        "objective/kl": ratios[:, 0],
        "objective/entropy": -logps[:, 0],
    }
    metrics = {name: Metric.of(jnp.sum(present * x), count) for name, x in figures.items()}
    if "rewards" in batch:
        reward = jnp.sum(batch["scored"] * batch["rewards"]), jnp.sum(batch["scored"])
        metrics["reward"] = Metric.of(*reward)
    metrics["rewards/won"] = Metric.of(jnp.sum(batch["won"]), jnp.sum(decided))
    rewards = (arguments.beta * chosen, arguments.beta * rejected)
    metrics |= pair_metrics(decided, rewards, by_winner(logps))
    total = jnp.sum(present * (decided * preference_losses + explored))
    return Loss.of(output, total, count, **metrics)


XPO = online_method(
    run=SelfPlayRun[XPOArguments],
    rows=rows,
    loss=loss,
    token_arrays=("reference_logps",),
    axes=get_pair_axes(),
    progress_columns=("reward", "rewards/won", "objective/kl", "loss"),
)


class XPOTrainer(Trainer):
    """Trains a model to prefer the better of two completions, its own and the reference's.

    `arguments` are `XPOArguments`.
    """

    entry = METHODS["xpo"]
    record = XPO
