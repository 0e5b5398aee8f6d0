"""What methods of pairs share: both answers of each pair go through the learner at once.

Legend: b rows, s positions, and slots of pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from ed_infra.outputs import CausalLMOutput

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.pairs import as_rows, by_side, pair_batch
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.options.preference import PairArguments
from ed_trainers.trainer import Trainer


class ScoredPairs(NamedTuple):
    """Pairs under the learner.

    Attributes:
        rows: the batch, as rows [2 b, s].
        output: of the forward pass over them.
        token_logps: log-probability of each target, [2 b, s].
        chosen: the better answers, [b, s].
        rejected: the others.
        present: 1 where a slot [b, s] holds a pair.
    """

    rows: dict[str, jax.Array]
    output: CausalLMOutput
    token_logps: jax.Array
    chosen: Answers
    rejected: Answers
    present: jax.Array


class PairTrainer(Trainer):
    """A trainer on batches with `chosen_*` and `rejected_*`, [b, s] each."""

    arguments: PairArguments
    per_token: ClassVar[bool] = False
    progress_columns: ClassVar[tuple[str, ...]] = ("loss", "rewards/accuracies", "rewards/margins")

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Stack the pairs, [b, 2, s]; see `pair_batch`."""
        return pair_batch(batch)

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Score the pairs, and return the loss of the method."""
        rows = as_rows(batch)
        output, token_logps = target_logps(
            models.learner,
            rows,
            key,
            placement=self.placement,
            chunk=self.arguments.lmhead_chunksize,
            noise=self.arguments.neftune_noise_alpha,
        )
        chosen, rejected = by_side(Answers.of(token_logps, rows["weights"], rows["segment_ids"]))
        present = chosen.present * rejected.present
        scored = ScoredPairs(rows, output, token_logps, chosen, rejected, present)
        return self.loss_of_pairs(models, scored)

    @abstractmethod
    def loss_of_pairs(self, models: Models, pairs: ScoredPairs) -> Loss:
        """Return the loss summed over the pairs."""
