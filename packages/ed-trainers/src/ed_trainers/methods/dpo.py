"""Direct preference optimization: a classifier of pairs whose score is a log-ratio to a reference.

Rafailov et al., arXiv:2305.18290. Other losses of a pair, by `loss_type`: `hinge` (SLiC,
2305.10425), `ipo` (2310.12036), `robust` (2403.00409), `exo_pair` (2402.00856), `nca_pair`
(2402.05369), `bco_pair` (2404.04656), `sppo_hard` (2405.00675), `discopop` (2406.08414), `apo_zero`
and `apo_down` (2408.06266); formulas as in TRL's trainer. Label smoothing of `sigmoid` is
conservative DPO (the appendix of 2305.18290).

Legend: b rows, s slots of pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Float

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, Models, Prepared
from ed_trainers.losses.pairs import (
    PAIR_COLUMNS,
    compute_smoothed_losses,
    pair_batch,
    pair_metrics,
    score_pairs,
    split_sides,
)
from ed_trainers.losses.segments import Answers
from ed_trainers.methods.reference import ReferenceRun, compute_ahead, reads_whole_batches
from ed_trainers.options.preference import DPOArguments
from ed_trainers.trainer import Trainer


class DPORun(ReferenceRun[DPOArguments]):
    """A run of `dpo`: the reference scores both answers of each pair."""

    sides = 2


def prepare(run: DPORun, batch: HostBatch) -> Prepared:
    """Stack the pairs, [b, 2, s]; see `pair_batch`."""
    return run.reference.add_logps(pair_batch(batch, model=run.learner))


def loss(run: DPORun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the loss summed over the pairs."""
    pairs = score_pairs(run, models, batch, key)
    sides, present = (pairs.chosen, pairs.rejected), pairs.present
    references = split_sides(run.reference.logps(models, pairs.rows))
    ratios = [
        Answers(side.logps - reference, side.tokens)
        for side, reference in zip(sides, references, strict=True)
    ]
    total = jnp.sum(present * _pair_losses(run.arguments, *ratios))
    rewards = tuple(run.arguments.beta * ratio.logps for ratio in ratios)
    metrics = pair_metrics(present, rewards, tuple(side.logps for side in sides))
    return Loss.of(pairs.output, total, jnp.sum(present), **metrics)


def _pair_losses(
    arguments: DPOArguments, chosen: Answers, rejected: Answers
) -> Float[Array, "b s"]:
    """Return the loss of each pair.

    Args:
        arguments: options that select the loss.
        chosen: log-ratios of the chosen answers to the reference.
        rejected: log-ratios of the rejected answers to the reference.
    """
    beta, smoothing = arguments.beta, arguments.smoothing
    difference = chosen.logps - rejected.logps
    match arguments.loss_type:
        case "sigmoid":
            return compute_smoothed_losses(beta * difference, smoothing)
        case "sigmoid_norm":
            return compute_smoothed_losses(
                beta * (chosen.mean_logps - rejected.mean_logps), smoothing
            )
        case "hinge":
            return relu(1 - beta * difference)
        case "ipo":
            per_token = chosen.mean_logps - rejected.mean_logps
            return (per_token - 1 / (2 * beta)) ** 2
        case "robust":
            clean = (1 - smoothing) * log_sigmoid(beta * difference)
            flipped = smoothing * log_sigmoid(-beta * difference)
            return -(clean - flipped) / (1 - 2 * smoothing)
        case "exo_pair":
            won, lost = beta * difference, -beta * difference
            right = sigmoid(won) * (log_sigmoid(won) - np.log1p(-smoothing))
            return right + sigmoid(lost) * (log_sigmoid(lost) - np.log(smoothing))
        case "nca_pair":
            good, bad = beta * chosen.logps, beta * rejected.logps
            return -log_sigmoid(good) - 0.5 * log_sigmoid(-good) - 0.5 * log_sigmoid(-bad)
        case "bco_pair":
            return -log_sigmoid(beta * chosen.logps) - log_sigmoid(-beta * rejected.logps)
        case "sppo_hard":
            return (chosen.logps - 0.5 / beta) ** 2 + (rejected.logps + 0.5 / beta) ** 2
        case "discopop":
            scaled = beta * difference
            mixed = sigmoid(scaled / arguments.discopop_tau)
            return -log_sigmoid(scaled) * (1 - mixed) + jnp.exp(-scaled) * mixed
        case "apo_zero":
            return 1 - sigmoid(beta * chosen.logps) + sigmoid(beta * rejected.logps)
        case "apo_down":
            return sigmoid(beta * chosen.logps) + 1 - sigmoid(beta * difference)
    raise AssertionError(arguments.loss_type)


DPO = Method[DPORun](
    run=DPORun,
    prepare=prepare,
    loss=loss,
    before_training=compute_ahead,
    whole_batches=reads_whole_batches,
    per_token=False,
    progress_columns=PAIR_COLUMNS,
)


class DPOTrainer(Trainer):
    """Trains a model to prefer the chosen answer of each pair; `arguments` are `DPOArguments`."""

    entry = METHODS["dpo"]
    record = DPO
