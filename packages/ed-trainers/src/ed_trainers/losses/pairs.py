"""Batches of pairs: a better and a worse answer in two rows that stay together.

A loader gives `chosen_*` and `rejected_*`, [b, s] each; the two answers of a pair have the same
segment number in the same row. Here the two stand in one array [b, 2, s], so that pairs are cut
into microbatches and laid over devices as one, and go through a model as [2 b, s].

Legend: b rows, s positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.segments import Answers

SIDES = ("chosen", "rejected")


def pair_batch(batch: HostBatch, sides: tuple[str, str] = SIDES) -> dict[str, np.ndarray]:
    """Stack the two sides of a loader's batch, targets and weights made; see `next_token_batch`.

    Returns:
        `input_ids`, `segment_ids`, `position_ids`, `targets`, `weights`, each [b, 2, s].

    Raises:
        ConfigError: a side is missing, or their shapes differ.
    """
    made = []
    for side in sides:
        lead = f"{side}_"
        own = {name.removeprefix(lead): v for name, v in batch.items() if name.startswith(lead)}
        if "input_ids" not in own:
            raise ConfigError(
                f"a batch of pairs has {sides[0]}_input_ids and {sides[1]}_input_ids, not only "
                f"{', '.join(sorted(batch))}: give rows with {' and '.join(sides)}"
            )
        made.append(next_token_batch(own))
    shapes = [part["input_ids"].shape for part in made]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"{sides[0]}_input_ids has shape {shapes[0]}, {sides[1]}_input_ids {shapes[1]}: the "
            "two answers of a pair stand in the same row"
        )
    return {name: np.stack([part[name] for part in made], axis=1) for name in made[0]}


def as_rows(batch: Batch) -> dict[str, jax.Array]:
    """The arrays [b, 2, s] as rows for a model, [2 b, s]."""
    return {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}


def by_side(answers: Answers) -> tuple[Answers, Answers]:
    """Chosen and rejected, [b, s] each, from the answers of rows [2 b, s]."""
    logps, tokens = (sides_of(rows) for rows in answers)
    return Answers(logps[0], tokens[0]), Answers(logps[1], tokens[1])


def sides_of(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of the chosen and of the rejected answers, [b, s] each, from rows [2 b, s]."""
    stacked = rows.reshape(-1, 2, rows.shape[-1])
    return stacked[:, 0], stacked[:, 1]


def smoothed(scores: jax.Array, smoothing: float) -> jax.Array:
    """`-log sigmoid(scores)`, where a share of the pairs is labelled the wrong way round."""
    right, wrong = jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores)
    return -(1 - smoothing) * right - smoothing * wrong


def pair_metrics(
    present: jax.Array,
    rewards: tuple[jax.Array, ...],
    logps: tuple[jax.Array, ...],
) -> dict[str, Metric]:
    """The figures that every method of pairs logs, with TRL's names; means over the pairs.

    Args:
        present: 1 where a slot [b, s] holds a pair.
        rewards: of the chosen and of the rejected answers, [b, s].
        logps: their log-probabilities.
    """
    pairs = jnp.sum(present)
    chosen, rejected = rewards
    figures = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[0],
        "logps/rejected": logps[1],
    }
    return {name: Metric.of(jnp.sum(present * x), pairs) for name, x in figures.items()}
