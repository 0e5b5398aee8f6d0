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

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.feed import HostBatch
from ed_trainers.losses.pairs import as_rows, by_side, pair_batch, pair_metrics
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.preference import ORPOArguments
from ed_trainers.trainer import Trainer


class ORPOTrainer(Trainer):
    """Learns to write the chosen answer of each pair, at better odds than the rejected one.

    `arguments` are `ORPOArguments`; batches have `chosen_*` and `rejected_*`. See `Trainer` for the
    rest.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = ORPOArguments
    arguments: ORPOArguments
    per_token: ClassVar[bool] = False

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Stack the pairs; prompts have targets too, and `text_weights` counts them."""
        pairs = pair_batch(batch)
        unmasked = {name: array for name, array in batch.items() if not name.endswith("labels")}
        text = pair_batch(unmasked)
        return {**pairs, "targets": text["targets"], "text_weights": text["weights"]}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the odds ratios summed over the pairs, and `nll` over the chosen texts' tokens."""
        rows = as_rows(batch)
        output, token_logps = target_logps(
            models.learner,
            rows,
            key,
            placement=self.placement,
            chunk=self.arguments.lmhead_chunksize,
        )
        chosen, rejected = by_side(Answers.of(token_logps, rows["weights"], rows["segment_ids"]))
        present = chosen.present * rejected.present
        # Per token; an empty slot gets a number at which the odds are finite.
        good, bad = (jnp.where(present > 0, a.mean_logps, -1.0) for a in (chosen, rejected))
        log_odds = (good - bad) - (_log1mexp(good) - _log1mexp(bad))
        ratio = log_sigmoid(log_odds)
        beta, pairs = self.arguments.beta, jnp.sum(present)

        text = batch["text_weights"][:, 0]
        cross_entropy = -jnp.sum(text * token_logps.reshape(-1, 2, text.shape[-1])[:, 0])
        nll = Metric.of(cross_entropy, jnp.sum(text))
        metrics = pair_metrics(present, (beta * good, beta * bad), (good, bad))
        metrics["log_odds_ratio"] = Metric.of(jnp.sum(present * ratio), pairs)
        metrics["log_odds_chosen"] = Metric.of(jnp.sum(present * log_odds), pairs)
        metrics["nll_loss"] = nll
        found = Loss.of(output, -beta * jnp.sum(present * ratio), pairs, **metrics)
        found.sums["nll"] = nll
        return found


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) of negative numbers, exact near 0 and far from it."""
    x = jnp.minimum(x, -1e-7)  # a certain answer has finite odds
    near = jnp.log(-jnp.expm1(jnp.maximum(x, -0.6931472)))
    return jnp.where(x > -0.6931472, near, jnp.log1p(-jnp.exp(jnp.minimum(x, -0.6931472))))
