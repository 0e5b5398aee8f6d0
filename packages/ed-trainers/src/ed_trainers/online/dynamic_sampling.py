"""Dynamic sampling of DAPO (Yu et al., arXiv:2503.14476): train on groups with different rewards.

If all completions of a prompt have the same reward, their advantages are 0. With `filter_groups`,
such a group is replaced by the group of a further prompt, until the batch is full or the generation
has completed `max_num_gen_batches` batches of prompts. The rounds of generation `g` read the
batches `g R`, `g R + 1`, … of the loader, where `R` is `max_num_gen_batches`. Therefore the prompts
are a function of the step, and a resumed run samples the same ones.

Legend: p prompts, g completions of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.online.completions import TOTAL, Completions, SampledPrompts
from ed_trainers.online.scorer import Scorer, Scores
from ed_trainers.options.groups import GroupArguments
from ed_trainers.options.online import OnlineArguments
from ed_trainers.rollout import Weights

#: Rewards of a group with a smaller distance are equal.
EQUAL = 1e-8


def sample_groups(
    options: GroupArguments, scorer: Scorer, sample: Callable[[int], Completions], weights: Weights
) -> SampledPrompts:
    """Complete batches of prompts until there are enough groups with different rewards.

    Args:
        options: the options of the method.
        scorer: computes the rewards.
        sample: returns the completions of the prompts of a round, from 0.
        weights: the weights that sample, for a reward model.

    Raises:
        ConfigError: `filter_groups_metric` names no reward.
    """
    assert isinstance(options, OnlineArguments), "the method samples"
    size, wanted = options.num_return_sequences, options.loader_batch_size
    parts: list[Completions] = []
    scores: list[Scores] = []
    unequal: list[bool] = []
    for later in range(options.rounds_per_generation):
        completions = sample(later)
        part_scores = scorer.score(completions, completions.rows(options.row_length), weights)
        metric = _get_metric(options, completions)
        unequal += are_unequal(metric.reshape(-1, size)).tolist()
        # A reward model is evaluated again; functions may be random, and are called once.
        functions = part_scores.rewards[:, : scorer.function_count]
        parts.append(replace(completions, rewards=functions))
        scores.append(part_scores)
        if sum(unequal) >= wanted:
            break
    # Unequal groups first, then equal ones, each in the order of the loader.
    order = np.argsort(~np.asarray(unequal), kind="stable")[:wanted]
    chosen = (np.sort(order)[:, None] * size + np.arange(size)).reshape(-1)
    rewards = np.concatenate([part.rewards for part in scores])
    total = np.concatenate([part.total for part in scores])
    figures = {
        **Scores(rewards, total, scores[0].names).figures(),
        "num_gen_batches": float(len(parts)),
        "frac_groups_filtered": 1 - sum(unequal) / len(unequal),
    }
    tokens = sum(len(ids) for part in parts for ids in part.completion_ids)
    return SampledPrompts(Completions.concat(parts).select(chosen.tolist()), figures, tokens)


def are_unequal(groups: np.ndarray) -> np.ndarray:
    """Return which groups have different rewards, bool [p].

    Args:
        groups: rewards [p, g]; NaN: no reward. A group with fewer than two rewards is equal.
    """
    finite = np.isfinite(groups)
    highest = np.where(finite, groups, -np.inf).max(axis=1)
    lowest = np.where(finite, groups, np.inf).min(axis=1)
    return (finite.sum(axis=1) > 1) & (highest - lowest > EQUAL)


def _get_metric(options: GroupArguments, completions: Completions) -> np.ndarray:
    """Return the compared reward of each completion."""
    name = options.filter_groups_metric
    if name not in completions.scores:
        known = ", ".join(n for n in completions.scores if n != TOTAL)
        raise ConfigError(
            f"filter_groups_metric {name!r} is no reward: use {TOTAL!r}, the weighted sum, or one "
            f"of {known}"
        )
    return completions.scores[name]
