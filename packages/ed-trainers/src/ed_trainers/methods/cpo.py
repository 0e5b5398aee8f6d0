"""Contrastive preference optimization and SimPO, without a reference.

CPO: Xu et al., arXiv:2401.08417; `hinge` (SLiC, 2305.10425), `ipo` (2310.12036) and `simpo`
(2405.14734) as in TRL's trainer. SimPO (Meng et al., arXiv:2405.14734) is CPO with
`loss_type: simpo` and `cpo_alpha: 0`. `alpha` shapes the rewards as in AlphaPO (2501.03884).

Legend: b rows, s slots of pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from jax.nn import relu

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models
from ed_trainers.losses.pairs import (
    PAIR_COLUMNS,
    compute_smoothed_losses,
    pair_metrics,
    prepare_pairs,
    score_pairs,
)
from ed_trainers.options.preference import CPOArguments, SimPOArguments
from ed_trainers.trainer import Trainer


def loss(
    run: MethodRun[CPOArguments] | MethodRun[SimPOArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the loss summed over the pairs, and the cross-entropy of the chosen tokens.

    TRL's `nll_loss` has no factor, so the weighted term has its own name.
    """
    arguments = run.arguments
    loss_type, weight = "simpo", 0.0
    if isinstance(arguments, CPOArguments):
        loss_type, weight = arguments.loss_type, arguments.cpo_alpha
    pairs = score_pairs(run, models, batch, key)
    chosen, rejected, present = pairs.chosen, pairs.rejected, pairs.present
    per_token = loss_type in ("ipo", "simpo")
    logps = [side.mean_logps if per_token else side.logps for side in (chosen, rejected)]
    rewards = [shape_rewards(values, arguments.alpha) for values in logps]
    total = jnp.sum(present * _pair_losses(arguments, loss_type, rewards[0] - rewards[1]))
    beta = arguments.beta
    metrics = pair_metrics(present, (beta * rewards[0], beta * rewards[1]), (logps[0], logps[1]))
    tokens = jnp.sum(chosen.tokens)
    cross_entropy = -jnp.sum(chosen.logps)
    pair_loss = Loss.of(pairs.output, total, jnp.sum(present), **metrics)
    if weight:
        pair_loss.sums["weighted_nll_loss"] = Metric.of(weight * cross_entropy, tokens)
        pair_loss.metrics["nll_loss"] = Metric.of(cross_entropy, tokens)
    return pair_loss


def shape_rewards(logps: jax.Array, alpha: float) -> jax.Array:
    """Return the rewards of answers from their log-probabilities; see `ContrastArguments.alpha`."""
    return -jnp.expm1(-alpha * logps) / alpha if alpha else logps


def _pair_losses(
    arguments: CPOArguments | SimPOArguments, loss_type: str, difference: jax.Array
) -> jax.Array:
    """Return the loss of each pair [b, s] from the difference of its rewards."""
    beta = arguments.beta
    match loss_type:
        case "simpo":
            margin = beta * difference - arguments.simpo_gamma
            return compute_smoothed_losses(margin, arguments.label_smoothing)
        case "sigmoid":
            return compute_smoothed_losses(beta * difference, arguments.label_smoothing)
        case "hinge":
            return relu(1 - beta * difference)
        case "ipo":
            return (difference - 1 / (2 * beta)) ** 2
    raise AssertionError(loss_type)


CPO = Method[MethodRun[CPOArguments]](
    prepare=prepare_pairs, loss=loss, per_token=False, progress_columns=PAIR_COLUMNS
)
SIMPO = Method[MethodRun[SimPOArguments]](
    prepare=prepare_pairs, loss=loss, per_token=False, progress_columns=PAIR_COLUMNS
)


class CPOTrainer(Trainer):
    """Trains a model to prefer and to write the chosen answers; `arguments` are `CPOArguments`."""

    entry = METHODS["cpo"]
    record = CPO


class SimPOTrainer(Trainer):
    """Trains a model to prefer the chosen answers by a margin; `arguments` are `SimPOArguments`."""

    entry = METHODS["simpo"]
    record = SIMPO
