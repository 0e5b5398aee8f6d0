"""Direct preference optimization: a classifier of pairs whose score is a log-ratio to a reference.

Rafailov et al., arXiv:2305.18290. Other losses of a pair, by `loss_type`: `hinge` (SLiC,
2305.10425), `ipo` (2310.12036), `robust` (2403.00409), `exo_pair` (2402.00856), `nca_pair`
(2402.05369), `bco_pair` (2404.04656), `sppo_hard` (2405.00675), `discopop` (2406.08414), `apo_zero`
and `apo_down` (2408.06266), `aot` and `aot_unpaired` (2406.05882); formulas as in TRL's trainer.
Label smoothing of `sigmoid` is conservative DPO (the appendix of 2305.18290).

Legend: b rows, s slots of pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Float

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, Models, Prepared
from ed_trainers.losses.pairs import (
    PAIR_COLUMNS,
    ScoredPairs,
    by_side,
    compute_smoothed_losses,
    discount_tails,
    get_slots,
    pair_batch,
    pair_metrics,
    score_pairs,
    split_sides,
)
from ed_trainers.losses.segments import Answers
from ed_trainers.losses.token_loss import token_square_logprobs
from ed_trainers.methods.reference import ReferenceRun, compute_ahead, reads_whole_batches
from ed_trainers.options.preference import DPOArguments
from ed_trainers.trainer import Trainer

# TRL's constants: below the first, the alpha divergence is the reverse divergence.
_SMALLEST_POWER, _LARGEST_LOG = 1e-6, 80.0


class DPORun(ReferenceRun[DPOArguments]):
    """A run of `dpo`: the reference scores both answers of each pair."""

    sides = 2


def prepare(run: DPORun, batch: HostBatch) -> Prepared:
    """Stack the pairs, [b, 2, s]; see `pair_batch`."""
    pairs = pair_batch(batch, model=run.learner)
    if run.arguments.ld_alpha is not None:
        pairs = discount_tails(pairs, run.arguments.ld_alpha)
    return run.reference.add_logps(pairs)


def loss(run: DPORun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the loss summed over the pairs; `sft_loss` beside other losses is a term of its
    own, a mean over the tokens of the chosen answers."""
    arguments, pairs = run.arguments, score_pairs(run, models, batch, key)
    sides, present = (pairs.chosen, pairs.rejected), pairs.present
    references = split_sides(run.reference.logps(models, pairs.rows))
    ratios = [
        Answers(side.logps - reference, side.tokens)
        for side, reference in zip(sides, references, strict=True)
    ]
    scores = [Answers(_differentiate(arguments, x.logps), x.tokens) for x in ratios]
    pair_weights = _weigh_pairs(run, models, pairs) if arguments.use_weighting else present
    total, count = jnp.zeros((), jnp.float32), jnp.sum(present)
    for name, weight in arguments.losses.items():
        if name == "aot":
            policy, reference = sides[0].logps - sides[1].logps, references[0] - references[1]
            total += weight * _transport_loss(arguments, name, policy, reference, present)
        elif name == "aot_unpaired":
            good, bad = (ratio.logps for ratio in ratios)
            total += weight * _transport_loss(arguments, name, good, bad, present)
        elif name != "sft":
            total += weight * jnp.sum(pair_weights * _pair_losses(arguments, name, *scores))
    rewards = tuple(arguments.beta * ratio.logps for ratio in ratios)
    metrics = pair_metrics(present, rewards, tuple(side.logps for side in sides))
    if "sft" not in arguments.losses:
        return Loss.of(pairs.output, total, count, **metrics)
    weighted = pairs.token_logps * pairs.rows["weights"]
    likelihood = arguments.losses["sft"] * jnp.sum(split_sides(weighted)[0])
    tokens = jnp.sum(split_sides(pairs.rows["weights"])[0])
    if len(arguments.losses) == 1:
        return Loss.of(pairs.output, -likelihood, tokens, **metrics)
    sum_of_losses = Loss.of(pairs.output, total, count, **metrics)
    sum_of_losses.sums["sft_loss"] = Metric.of(-likelihood, tokens)
    return sum_of_losses


def _differentiate(arguments: DPOArguments, log_ratios: jax.Array) -> jax.Array:
    """Return the derivative of the divergence at ratios to the reference, up to a constant."""
    power = arguments.f_alpha_divergence_coef - 1
    match arguments.f_divergence_type:
        case "forward_kl":
            return 1 - jnp.exp(-log_ratios)
        case "js_divergence":
            return np.log(2) + log_sigmoid(log_ratios)
        case "alpha_divergence" if abs(power) >= _SMALLEST_POWER:
            return jnp.expm1(jnp.minimum(power * log_ratios, _LARGEST_LOG)) / power
    return log_ratios


def _weigh_pairs(run: DPORun, models: Models, pairs: ScoredPairs) -> Float[Array, "b s"]:
    """Return the weight of each pair (WPO, eq. 2): the probability of its answers per token.

    The probability of a token is relative to that of two equal samples at its position. No
    gradient flows through the weight; 0 where there is no pair.
    """
    assert pairs.output.last_hidden_state is not None
    hidden = jax.lax.stop_gradient(pairs.output.last_hidden_state)
    squares = token_square_logprobs(
        hidden,
        models.learner.head(),
        sharding=run.placement.sharding(pairs.rows["targets"].shape),
        chunk=run.arguments.lmhead_chunksize,
    )
    aligned = jax.lax.stop_gradient(pairs.token_logps) - squares
    rows = pairs.rows
    answers = by_side(Answers.of(aligned, rows["weights"], get_slots(rows)))
    log_weight = answers[0].mean_logps + answers[1].mean_logps
    return pairs.present * jax.lax.stop_gradient(jnp.exp(log_weight))


def _transport_loss(
    arguments: DPOArguments,
    name: str,
    better: Float[Array, "b s"],
    worse: Float[Array, "b s"],
    present: Float[Array, "b s"],
) -> Float[Array, ""]:
    """Return the sum of the losses of the differences of two sorted sets of log-ratios."""
    counted = jnp.arange(present.size) < jnp.sum(present)

    def sort(values: jax.Array) -> jax.Array:
        ordered = jnp.sort(jnp.where(present > 0, values, jnp.inf).reshape(-1))
        return jnp.where(counted, ordered, 0.0)

    differences = arguments.beta * (sort(better) - sort(worse))
    losses = compute_smoothed_losses(differences, arguments.get_smoothing(name))
    return jnp.sum(jnp.where(counted, losses, 0.0))


def _pair_losses(
    arguments: DPOArguments, name: str, chosen: Answers, rejected: Answers
) -> Float[Array, "b s"]:
    """Return the loss of each pair.

    Args:
        arguments: options of the loss.
        name: the loss.
        chosen: log-ratios of the chosen answers to the reference, or their scores.
        rejected: the same of the rejected answers.
    """
    beta, smoothing = arguments.beta, arguments.get_smoothing(name)
    difference = chosen.logps - rejected.logps
    match name:
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
    raise AssertionError(name)


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
