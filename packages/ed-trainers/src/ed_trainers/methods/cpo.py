"""Contrastive preference optimization, without a reference: chosen answers likelier than rejected.

Xu et al., arXiv:2401.08417; `hinge` (SLiC, 2305.10425), `ipo` (2310.12036) and `simpo` (2405.14734)
as in TRL's trainer.

Legend: b rows, s slots of pairs.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from jax.nn import relu

from ed_trainers.contract import Loss, Models
from ed_trainers.losses.pairs import pair_metrics, smoothed
from ed_trainers.methods.pairs import PairTrainer, ScoredPairs
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.preference import ContrastArguments, CPOArguments


class CPOTrainer(PairTrainer):
    """Learns to prefer the chosen answer of each pair, and to write it.

    `arguments` are `CPOArguments`; batches have `chosen_*` and `rejected_*`. See `Trainer` for the
    rest.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = CPOArguments
    arguments: ContrastArguments

    @property
    def loss_type(self) -> str:
        """The loss of a pair."""
        assert isinstance(self.arguments, CPOArguments)
        return self.arguments.loss_type

    @property
    def cross_entropy_weight(self) -> float:
        """Weight of the cross-entropy of the chosen answer."""
        assert isinstance(self.arguments, CPOArguments)
        return self.arguments.cpo_alpha

    def loss_of_pairs(self, models: Models, pairs: ScoredPairs) -> Loss:
        """Return the loss summed over the pairs, and the cross-entropy of the chosen tokens.

        TRL's `nll_loss` has no factor, so the term of the total has a name of its own.
        """
        chosen, rejected, present = pairs.chosen, pairs.rejected, pairs.present
        per_token = self.loss_type in ("ipo", "simpo")
        logps = [side.mean_logps if per_token else side.logps for side in (chosen, rejected)]
        total = jnp.sum(present * self.pair_losses(logps[0] - logps[1]))
        beta = self.arguments.beta
        metrics = pair_metrics(present, (beta * logps[0], beta * logps[1]), (logps[0], logps[1]))
        tokens = jnp.sum(chosen.tokens)
        cross_entropy = -jnp.sum(chosen.logps)
        found = Loss.of(pairs.output, total, jnp.sum(present), **metrics)
        if self.cross_entropy_weight:
            weighted = self.cross_entropy_weight * cross_entropy
            found.sums["weighted_nll_loss"] = Metric.of(weighted, tokens)
            found.metrics["nll_loss"] = Metric.of(cross_entropy, tokens)
        return found

    def pair_losses(self, difference: jax.Array) -> jax.Array:
        """The loss of each pair [b, s], of the difference of its log-probabilities."""
        arguments, beta = self.arguments, self.arguments.beta
        match self.loss_type:
            case "simpo":
                margin = beta * difference - arguments.simpo_gamma
                return smoothed(margin, arguments.label_smoothing)
            case "sigmoid":
                return smoothed(beta * difference, arguments.label_smoothing)
            case "hinge":
                return relu(1 - beta * difference)
            case "ipo":
                return (difference - 1 / (2 * beta)) ** 2
        raise AssertionError(self.loss_type)
