"""Odds-ratio preference optimization: cross-entropy of the chosen text, and an odds ratio.

Hong et al., arXiv:2403.07691, eqs. 4 to 7; as in TRL's trainer, whose `beta` is the paper's lambda.

Legend: b rows, s positions, and slots of pairs.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric
from jax.nn import log_sigmoid

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Loss, Models
from ed_trainers.losses.pairs import pair_batch, pair_metrics, sides_of
from ed_trainers.methods.pairs import PairTrainer, ScoredPairs
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.preference import ORPOArguments


class ORPOTrainer(PairTrainer):
    """Learns to write the chosen answer of each pair, at better odds than the rejected one.

    `arguments` are `ORPOArguments`; batches have `chosen_*` and `rejected_*`. See `Trainer` for the
    rest.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = ORPOArguments
    arguments: ORPOArguments

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Stack the pairs; prompts have targets too, and `text_weights` counts them."""
        pairs = super().prepare(batch)
        unmasked = {name: array for name, array in batch.items() if not name.endswith("labels")}
        text = pair_batch(unmasked)
        return {**pairs, "targets": text["targets"], "text_weights": text["weights"]}

    def loss_of_pairs(self, models: Models, pairs: ScoredPairs) -> Loss:
        """Return the odds ratios summed over the pairs, and `nll_loss` over the chosen texts."""
        present, sides = pairs.present, (pairs.chosen, pairs.rejected)
        # Per token; an empty slot gets a number at which the odds are finite.
        good, bad = (jnp.where(present > 0, side.mean_logps, -1.0) for side in sides)
        log_odds = (good - bad) - (_log1mexp(good) - _log1mexp(bad))
        ratio = log_sigmoid(log_odds)
        beta, count = self.arguments.beta, jnp.sum(present)

        text, token_logps = (
            sides_of(rows)[0] for rows in (pairs.rows["text_weights"], pairs.token_logps)
        )
        cross_entropy = -jnp.sum(text * token_logps)
        metrics = pair_metrics(present, (beta * good, beta * bad), (good, bad))
        metrics["log_odds_ratio"] = Metric.of(jnp.sum(present * ratio), count)
        metrics["log_odds_chosen"] = Metric.of(jnp.sum(present * log_odds), count)
        found = Loss.of(pairs.output, -beta * jnp.sum(present * ratio), count, **metrics)
        found.sums["nll_loss"] = Metric.of(cross_entropy, jnp.sum(text))
        return found


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) of negative numbers, exact near 0 and far from it."""
    x = jnp.minimum(x, -1e-7)  # a certain answer has finite odds
    near = jnp.log(-jnp.expm1(jnp.maximum(x, -0.6931472)))
    return jnp.where(x > -0.6931472, near, jnp.log1p(-jnp.exp(jnp.minimum(x, -0.6931472))))
