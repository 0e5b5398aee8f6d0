"""Group filtered policy optimization: `grpo` on some completions of each group.

Shrivastava et al., arXiv:2508.09726: the completions with the best filter scores are trained, and
advantages are relative to the trained completions of the group. The filter scores of
`GFPOArguments` prefer short completions and high rewards per token, the two metrics of the paper.

Legend: n completions, p prompts, g completions of a prompt (n = p g).
"""

from __future__ import annotations

import numpy as np

from ed_trainers.arguments import METHODS
from ed_trainers.methods import grpo
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import HELD_OUT, PhaseRows, online_method
from ed_trainers.options.groups import GFPOArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer

# Keeps the relative efficiency finite if all rewards are 0.
_SMALL = 1e-8


def rows(
    run: grpo.GroupRun[GFPOArguments], completions: Completions, weights: Weights, number: int
) -> PhaseRows:
    """Return the rows of `grpo` for the completions that remain, and figures of all completions.

    All held-out completions remain.
    """
    remain = run.arguments.num_remains_in_group
    if remain is None or number == HELD_OUT:
        return grpo.rows(run, completions, weights, number)
    all_rows = completions.rows(run.arguments.row_length)
    scores = run.scorer.score(completions, all_rows, weights)
    lengths = np.asarray([len(ids) for ids in completions.completion_ids])
    best_indices = best(run.arguments, scores.total, lengths)
    remaining_scores = scores._replace(
        rewards=scores.rewards[best_indices], total=scores.total[best_indices], per_prompt=remain
    )
    row_arrays, figures = grpo.rows(
        run, completions.select(best_indices.tolist()), weights, number, remaining_scores
    )
    trained = {"completions/mean_trained_length": float(lengths[best_indices].mean())}
    return row_arrays, {**figures, **scores.figures(), **trained}


def best(arguments: GFPOArguments, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the numbers of the completions that remain, int [p * num_remains_in_group].

    Args:
        arguments: the options of the filter.
        rewards: rewards [n]; a completion without a reward (NaN) remains last.
        lengths: number of tokens of each completion, [n].
    """
    scores = np.where(np.isfinite(rewards), 0.0, -np.inf)
    if arguments.filter_by_efficiency:
        efficiency = np.nan_to_num(rewards.astype(np.float64)) / np.maximum(lengths, 1)
        relative = efficiency / (np.abs(efficiency).max() + _SMALL)
        scores = scores + arguments.efficiency_weight * relative
    if arguments.filter_by_length:
        short = 1 - lengths / arguments.max_completion_length
        scores = scores + arguments.length_weight * short
    groups = scores.reshape(-1, arguments.num_return_sequences)
    order = np.argsort(-groups, axis=1, kind="stable")[:, : arguments.num_remains_in_group]
    starts = np.arange(len(groups))[:, None] * arguments.num_return_sequences
    return (starts + np.sort(order, axis=1)).reshape(-1)


GFPO = online_method(
    run=grpo.GroupRun[GFPOArguments],
    rows=rows,
    loss=grpo.loss,
    token_arrays=grpo.TOKEN_ARRAYS,
    progress_columns=grpo.GROUP_COLUMNS,
)


class GFPOTrainer(Trainer):
    """Trains a model on the filtered completions of groups; `arguments` are `GFPOArguments`."""

    entry = METHODS["gfpo"]
    record = GFPO
