"""Binary classifier optimization: single good answers and bad answers.

Jung et al., arXiv:2404.04656, eq. 12: cross-entropy of a classifier whose score is the reward
`beta log(p / p_ref)` minus a shift, the middle of the mean rewards of good and of bad answers. The
paper uses a moving average of the shift. This implementation uses the shift of the whole step, or
of the whole evaluation, so a step depends on its batch only.

Legend: b rows, s slots of answers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from jax.nn import log_sigmoid

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Method, Models
from ed_trainers.methods.labelled import ScoredAnswers, prepare_labelled, score_answers
from ed_trainers.methods.reference import ReferenceRun, compute_ahead, reads_whole_batches
from ed_trainers.options.preference import BCOArguments
from ed_trainers.trainer import Trainer


def _statistics(
    run: ReferenceRun[BCOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> dict[str, Metric]:
    """Return the mean rewards of good and of bad answers."""
    return _means(run, score_answers(run, models, batch, key)[1])


def loss(
    run: ReferenceRun[BCOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the cross-entropy summed over the answers, weighted by kind."""
    arguments = run.arguments
    output, scored = score_answers(run, models, batch, key)
    means = {name: metric.value for name, metric in _means(run, scored).items()}
    shift = sum(batch.get(name, mean) for name, mean in means.items()) / len(means)
    rewards = arguments.beta * scored.ratios - jax.lax.stop_gradient(shift)
    good = -arguments.desirable_weight * scored.good * log_sigmoid(rewards)
    bad = -arguments.undesirable_weight * scored.bad * log_sigmoid(-rewards)
    count = jnp.sum(scored.good + scored.bad)
    metrics = scored.metrics(arguments.beta)
    metrics["delta"] = Metric.of(shift * count, count)
    return Loss.of(output, jnp.sum(good + bad), count, **metrics)


def _means(run: ReferenceRun[BCOArguments], scored: ScoredAnswers) -> dict[str, Metric]:
    figures = scored.metrics(run.arguments.beta)
    return {name: figures[name] for name in ("rewards/chosen", "rewards/rejected")}


BCO = Method[ReferenceRun[BCOArguments]](
    prepare=prepare_labelled,
    loss=loss,
    statistics=_statistics,
    run=ReferenceRun,
    before_training=compute_ahead,
    whole_batches=reads_whole_batches,
    per_token=False,
    progress_columns=("loss", "delta", "rewards/chosen", "rewards/rejected"),
)


class BCOTrainer(Trainer):
    """Trains a model to separate good and bad answers; `arguments` are `BCOArguments`."""

    entry = METHODS["bco"]
    record = BCO
