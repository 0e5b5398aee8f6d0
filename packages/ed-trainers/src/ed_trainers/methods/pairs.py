"""Functions of the methods on pairs: both answers of each pair in one forward pass of the learner.

Legend: b rows, s positions and slots of pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from ed_infra.outputs import CausalLMOutput

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, MethodRun, Models, Prepared
from ed_trainers.losses.pairs import as_rows, by_side, get_slots, pair_batch
from ed_trainers.losses.scoring import learner_logps
from ed_trainers.losses.segments import Answers

#: Figures in the terminal and the summary.
COLUMNS = ("loss", "rewards/accuracies", "rewards/margins")


class ScoredPairs(NamedTuple):
    """Pairs under the learner.

    Attributes:
        rows: the batch as rows [2 b, s].
        output: output of the forward pass over the rows.
        token_logps: log-probability of each target, [2 b, s].
        chosen: the better answers, [b, s].
        rejected: the worse answers.
        present: 1 where a slot [b, s] holds a pair.
    """

    rows: Batch
    output: CausalLMOutput
    token_logps: jax.Array
    chosen: Answers
    rejected: Answers
    present: jax.Array


def prepare_pairs(run: MethodRun, batch: HostBatch) -> Prepared:
    """Stack the pairs, [b, 2, s]; see `pair_batch`."""
    return pair_batch(batch, model=run.learner)


def score_pairs(run: MethodRun, models: Models, batch: Batch, key: jax.Array | None) -> ScoredPairs:
    """Return the log-probabilities of both answers of each pair under the learner."""
    rows = as_rows(batch)
    output, token_logps = learner_logps(run, models, rows, key)
    chosen, rejected = by_side(Answers.of(token_logps, rows["weights"], get_slots(rows)))
    present = chosen.present * rejected.present
    return ScoredPairs(rows, output, token_logps, chosen, rejected, present)
