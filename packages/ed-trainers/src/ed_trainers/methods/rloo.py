"""REINFORCE with a leave-one-out baseline: a reward relative to the other rewards of the group.

Ahmadian et al., arXiv:2402.14740, with the clipped ratio of a whole completion as in TRL's trainer.
The divergence from the reference, summed over the tokens, is subtracted from the reward.

Legend: n completions, s positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.policy import (
    clip_metrics,
    count_scored_rows,
    old_logps,
    row_metrics,
)
from ed_trainers.methods.grpo import GROUP_COLUMNS, GroupRun, group_rows, nanmean, nanstd
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import PhaseRows, compute_policy, online_method
from ed_trainers.options.groups import RLOOArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer

# TRL's constant.
_SMALL = 1e-4


def rows(
    run: GroupRun[RLOOArguments], completions: Completions, weights: Weights, number: int
) -> PhaseRows:
    """Return the rows of `group_rows`; the figures have the divergence of a token, `kl`."""
    asks = run.arguments.updates_per_generation > 1 or run.arguments.has_reference
    row_arrays, figures = group_rows(
        run, completions, weights, number, asks=asks, ask=_policies, advantages=_advantages
    )
    if "reference_logps" in row_arrays:
        log_ratios = (row_arrays["old_logps"] - row_arrays.pop("reference_logps")) * row_arrays[
            "weights"
        ]
        figures["kl"] = float(log_ratios.sum() / max(row_arrays["weights"].sum(), 1))
    return row_arrays, figures


def _policies(run: GroupRun[RLOOArguments], models: Models, batch: Batch) -> dict[str, jax.Array]:
    """Return `old_logps` and, with a reference, `reference_logps` of rows, [n, s]."""
    out = {"old_logps": compute_policy(run, models.learner, batch)[1].logps}
    if run.arguments.has_reference:
        out["reference_logps"] = compute_policy(run, models["reference"], batch)[1].logps
    return out


def _advantages(
    run: GroupRun[RLOOArguments], groups: np.ndarray, row_arrays: dict[str, np.ndarray]
) -> np.ndarray:
    """Return the rewards [p, g] minus the mean reward of the others of their group."""
    arguments = run.arguments
    if arguments.reward_clip_range is not None:
        groups = np.clip(groups, *arguments.reward_clip_range)
    if arguments.has_reference:
        log_ratios = (row_arrays["old_logps"] - row_arrays["reference_logps"]) * row_arrays[
            "weights"
        ]
        groups = groups - arguments.beta * log_ratios.sum(-1).reshape(groups.shape)
    count = np.isfinite(groups).sum(-1, keepdims=True)
    other_sums = np.nansum(groups, axis=-1, keepdims=True) - groups
    baseline = np.where(count > 1, other_sums / np.maximum(count - 1, 1), np.nan)
    flat_advantages = (groups - baseline).reshape(-1)
    if arguments.normalize_advantages:
        scale = nanstd(flat_advantages) + _SMALL
        flat_advantages = (flat_advantages - nanmean(flat_advantages)) / scale
    return flat_advantages


def loss(run: GroupRun[RLOOArguments], models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the clipped loss of each completion, summed over the completions."""
    batch = count_scored_rows(batch)
    arguments, weights = run.arguments, batch["weights"]
    output, policy = compute_policy(run, models.learner, batch, key)
    log_ratios = (policy.logps - old_logps(batch, policy)) * weights
    ratios = jnp.exp(jnp.sum(log_ratios, axis=-1))
    lower, upper = 1 - arguments.epsilon, 1 + arguments.upper
    gains, present = batch["advantages"], batch["present"]
    clipped = jnp.clip(ratios, lower, upper)
    losses = -jnp.minimum(ratios * gains, clipped * gains)
    metrics = row_metrics(batch, policy)
    metrics |= clip_metrics(ratios, gains, present, lower, upper)
    return Loss.of(output, jnp.sum(losses * present), jnp.sum(present), **metrics)


RLOO = online_method(
    run=GroupRun[RLOOArguments],
    rows=rows,
    loss=loss,
    token_arrays=("old_logps",),
    progress_columns=GROUP_COLUMNS,
)


class RLOOTrainer(Trainer):
    """Trains a model on groups of completions and their rewards; `arguments`: `RLOOArguments`."""

    entry = METHODS["rloo"]
    record = RLOO
