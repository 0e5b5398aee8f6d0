"""Nash learning from human feedback: the learner's completions against those of a mixture.

Munos et al., arXiv:2312.00886, Nash-MD-PG (section 8): the opponent is the geometric mixture of
the learner and the reference. The gradient is that of the log-probability of the learner's
completion, times its probability to win minus 1/2, minus `beta` times its log-ratio to the
reference.

Legend: n prompts, b rows, s positions.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.policy import row_metrics
from ed_trainers.methods.xpo import SelfPlayRun
from ed_trainers.online.completions import Completions
from ed_trainers.online.mixture import GeometricMixture
from ed_trainers.online.phase import PhaseRows, compute_policy, online_method
from ed_trainers.options.online import NashMDArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer


def build_opponent(run: SelfPlayRun[NashMDArguments], models: Models) -> object:
    """Return the mixture of the learner and the reference."""
    return GeometricMixture(models.learner, models["reference"], run.arguments.mixture_coef)


def rows(
    run: SelfPlayRun[NashMDArguments], completions: Completions, weights: Weights, number: int
) -> PhaseRows:
    """Return rows of the learner's completions with `reference_logps` [n, s].

    `wins` [n] is the probability that the completion is better, and `present` [n] is 1 where that
    probability is known.
    """
    del number
    contest = run.referee.contest(completions, weights, partial(build_opponent, run))
    row_arrays = {**contest.learner_rows, **contest.scored}
    row_arrays |= run.phase.ask(_reference_logps, row_arrays, weights)
    win_mask = np.isfinite(contest.wins)
    row_arrays["wins"] = np.where(win_mask, contest.wins, 0).astype(np.float32)
    row_arrays["present"] = win_mask.astype(np.float32)
    return row_arrays, contest.figures


def _reference_logps(
    run: SelfPlayRun[NashMDArguments], models: Models, batch: Batch
) -> dict[str, jax.Array]:
    """Return the log-probabilities of the tokens of rows under the reference."""
    return {"reference_logps": compute_policy(run, models["reference"], batch)[1].logps}


def loss(
    run: SelfPlayRun[NashMDArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the loss summed over the completions. Only its gradient has a meaning."""
    weights, wins = batch["weights"], batch["wins"]
    output, policy = compute_policy(run, models.learner, batch, key)
    logps = jnp.sum(weights * policy.logps, axis=-1)
    ratios = jax.lax.stop_gradient(logps) - jnp.sum(weights * batch["reference_logps"], axis=-1)
    score = (wins - 0.5) * logps
    divergence = run.arguments.beta * ratios * logps
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


NASH_MD = online_method(
    run=SelfPlayRun[NashMDArguments],
    rows=rows,
    loss=loss,
    token_arrays=("reference_logps",),
    progress_columns=("reward", "rewards/accuracies", "objective/kl", "loss"),
)


class NashMDTrainer(Trainer):
    """Trains a model to win against a mixture of itself and the reference.

    `arguments` are `NashMDArguments`.
    """

    entry = METHODS["nash_md"]
    record = NASH_MD
