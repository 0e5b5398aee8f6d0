"""Odds-ratio preference optimization: cross-entropy of the chosen text, and an odds ratio.

Hong et al., arXiv:2403.07691, eqs. 4 to 7; as in TRL's trainer, whose `beta` is the paper's lambda.

Legend: b rows, s positions and slots of pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from jax.nn import log_sigmoid

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.pairs import (
    PAIR_COLUMNS,
    get_pair_axes,
    pair_batch,
    pair_metrics,
    score_pairs,
    split_sides,
)
from ed_trainers.options.preference import ORPOArguments
from ed_trainers.placement import with_arrays
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[ORPOArguments], batch: HostBatch) -> Prepared:
    """Stack the pairs; prompts have targets too, and `text_weights` counts them."""
    del run
    unmasked = {name: array for name, array in batch.items() if not name.endswith("labels")}
    text = pair_batch(unmasked)
    return with_arrays(
        pair_batch(batch), get_pair_axes(), targets=text["targets"], text_weights=text["weights"]
    )


def loss(
    run: MethodRun[ORPOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the odds ratios summed over the pairs, and `nll_loss` over the chosen texts."""
    pairs = score_pairs(run, models, batch, key)
    present, sides = pairs.present, (pairs.chosen, pairs.rejected)
    # Per token; an empty slot gets a number at which the odds are finite.
    good, bad = (jnp.where(present > 0, side.mean_logps, -1.0) for side in sides)
    log_odds = (good - bad) - (_log1mexp(good) - _log1mexp(bad))
    ratio = log_sigmoid(log_odds)
    beta, count = run.arguments.beta, jnp.sum(present)

    text, token_logps = (
        split_sides(rows)[0] for rows in (pairs.rows["text_weights"], pairs.token_logps)
    )
    cross_entropy = -jnp.sum(text * token_logps)
    metrics = pair_metrics(present, (beta * good, beta * bad), (good, bad))
    metrics["log_odds_ratio"] = Metric.of(jnp.sum(present * ratio), count)
    metrics["log_odds_chosen"] = Metric.of(jnp.sum(present * log_odds), count)
    pair_loss = Loss.of(pairs.output, -beta * jnp.sum(present * ratio), count, **metrics)
    pair_loss.sums["nll_loss"] = Metric.of(cross_entropy, jnp.sum(text))
    return pair_loss


def _log1mexp(x: jax.Array) -> jax.Array:
    """Return log(1 - exp(x)) of negative numbers, exact near 0 and far from 0."""
    x = jnp.minimum(x, -1e-7)  # an answer with probability 1 has finite odds
    near_zero = jnp.log(-jnp.expm1(jnp.maximum(x, -0.6931472)))
    return jnp.where(x > -0.6931472, near_zero, jnp.log1p(-jnp.exp(jnp.minimum(x, -0.6931472))))


ORPO = Method[MethodRun[ORPOArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=PAIR_COLUMNS
)


class ORPOTrainer(Trainer):
    """Trains a model to write the chosen answer at better odds; `arguments` are `ORPOArguments`."""

    entry = METHODS["orpo"]
    record = ORPO
