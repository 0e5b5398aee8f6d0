"""Triple preference optimization: a preference, and the cross-entropy of a third, right answer.

Saeidi et al., arXiv:2405.16681; `hinge` (SLiC, 2305.10425), `ipo` (2310.12036) and the variant with
normalized lengths, `tpo-l`, as in TRL's trainer. The score of an answer is its log-probability, so
there is no reference model. `reference` is the field of the third answer, as in TRL.

Legend: b rows, s positions and slots of answers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from jax.nn import relu

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.pairs import (
    PAIR_COLUMNS,
    SIDES,
    as_rows,
    compute_smoothed_losses,
    get_slots,
    pair_batch,
    pair_metrics,
)
from ed_trainers.losses.scoring import learner_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.options.preference import TPOArguments
from ed_trainers.trainer import Trainer

_GOLD = "reference"


def prepare(run: MethodRun[TPOArguments], batch: HostBatch) -> Prepared:
    """Stack the answers, [b, 3, s], or [b, 2, s] without the right one; see `pair_batch`."""
    sides = (*SIDES, _GOLD) if run.arguments.tpo_alpha else SIDES
    return pair_batch(batch, sides, run.learner)


def loss(run: MethodRun[TPOArguments], models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the loss summed over the pairs, and the cross-entropy of the right answers."""
    arguments = run.arguments
    count = batch["targets"].shape[1]
    rows = as_rows(batch)
    output, token_logps = learner_logps(run, models, rows, key)

    def split_answers(values: jax.Array) -> list[jax.Array]:
        stacked = values.reshape(-1, count, values.shape[-1])
        return [stacked[:, side] for side in range(count)]

    answers = Answers.of(token_logps, rows["weights"], get_slots(rows))
    sides = [Answers(*side) for side in zip(*map(split_answers, answers), strict=True)]
    chosen, rejected = sides[:2]
    per_token = arguments.loss_type in ("ipo", "tpo-l")
    logps = [side.mean_logps if per_token else side.logps for side in (chosen, rejected)]
    present = chosen.present * rejected.present
    total = jnp.sum(present * _compute_pair_losses(arguments, logps[0] - logps[1]))
    rewards = (arguments.beta * logps[0], arguments.beta * logps[1])
    metrics = pair_metrics(present, rewards, (logps[0], logps[1]))
    pair_loss = Loss.of(output, total, jnp.sum(present), **metrics)
    if count == len(SIDES):
        return pair_loss
    weights = split_answers(rows["weights"])[2]
    cross_entropy = -jnp.sum(weights * split_answers(token_logps)[2])
    tokens = jnp.sum(weights)
    pair_loss.sums["weighted_nll_loss"] = Metric.of(arguments.tpo_alpha * cross_entropy, tokens)
    pair_loss.metrics["nll_loss"] = Metric.of(cross_entropy, tokens)
    return pair_loss


def _compute_pair_losses(arguments: TPOArguments, difference: jax.Array) -> jax.Array:
    """Return the loss of each pair [b, s] from the difference of its scores."""
    beta = arguments.beta
    match arguments.loss_type:
        case "sigmoid":
            return compute_smoothed_losses(beta * difference, arguments.label_smoothing)
        case "tpo-l":
            margin = beta * difference - arguments.tpo_l_gamma
            return compute_smoothed_losses(margin, arguments.label_smoothing)
        case "hinge":
            return relu(1 - beta * difference)
        case "ipo":
            return (difference - 1 / (2 * beta)) ** 2
    raise AssertionError(arguments.loss_type)


TPO = Method[MethodRun[TPOArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=PAIR_COLUMNS
)


class TPOTrainer(Trainer):
    """Trains a model to prefer the chosen answers and to write the answers `reference`.

    `arguments` are `TPOArguments`.
    """

    entry = METHODS["tpo"]
    record = TPO
