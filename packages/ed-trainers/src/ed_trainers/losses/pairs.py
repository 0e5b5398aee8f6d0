"""Batches of pairs: a better and a worse answer, stacked in one array.

A loader yields `chosen_*` and `rejected_*`, [b, s] each; the two answers of a pair have the same
segment number in the same row. Stacked arrays [b, 2, s] keep both answers in the same microbatch
and on the same device. A model reads them as [2 b, s].

Legend: b rows, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric
from ed_infra.sharding.axes import LogicalAxes

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.segments import Answers
from ed_trainers.placement import TOKENS

SIDES = ("chosen", "rejected")


def pair_batch(batch: HostBatch, sides: tuple[str, str] = SIDES) -> Inputs[np.ndarray]:
    """Stack the two sides of a loader's batch, with targets and weights; see `next_token_batch`.

    Returns:
        `input_ids`, `segment_ids`, `position_ids`, `targets`, `weights`, each [b, 2, s], and the
        further arrays that both sides have.

    Raises:
        ConfigError: a side is missing, or the shapes of the sides differ.
    """
    made = []
    for side in sides:
        lead = f"{side}_"
        own = {name.removeprefix(lead): v for name, v in batch.items() if name.startswith(lead)}
        if "input_ids" not in own:
            raise ConfigError(
                f"a batch of pairs has {sides[0]}_input_ids and {sides[1]}_input_ids, not only "
                f"{', '.join(sorted(batch))}: use rows with {' and '.join(sides)}"
            )
        made.append(next_token_batch(own))
    shapes = [part["input_ids"].shape for part in made]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"{sides[0]}_input_ids has shape {shapes[0]}, {sides[1]}_input_ids {shapes[1]}: the "
            "two answers of a pair must be in the same row"
        )
    both = [name for name in made[0] if name in made[1]]
    arrays = {name: np.stack([part[name] for part in made], axis=1) for name in both}
    return Inputs(arrays, {name: paired(made[0].axes_of(name)) for name in both})


def paired(axes: LogicalAxes = TOKENS) -> LogicalAxes:
    """Return the axes of an array [b, 2, ...] from the axes of one side, [b, ...]."""
    return (axes[0], None, *axes[1:])


def as_rows(batch: Mapping[str, jax.Array]) -> Batch:
    """Return the arrays [b, 2, ...] as rows for a model, [2 b, ...]."""
    return Inputs({name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()})


def by_side(answers: Answers) -> tuple[Answers, Answers]:
    """Split the answers of rows [2 b, s] into chosen and rejected ones, [b, s] each."""
    logps, tokens = (sides_of(rows) for rows in answers)
    return Answers(logps[0], tokens[0]), Answers(logps[1], tokens[1])


def sides_of(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split rows [2 b, s] into the rows of the chosen and of the rejected answers, [b, s] each."""
    stacked = rows.reshape(-1, 2, rows.shape[-1])
    return stacked[:, 0], stacked[:, 1]


def smoothed(scores: jax.Array, smoothing: float) -> jax.Array:
    """Return `-log sigmoid(scores)` if a share of the pairs has the wrong label."""
    right, wrong = jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores)
    return -(1 - smoothing) * right - smoothing * wrong


def pair_metrics(
    present: jax.Array,
    rewards: tuple[jax.Array, ...],
    logps: tuple[jax.Array, ...],
) -> dict[str, Metric]:
    """Return the figures that every method of pairs logs, with TRL's names; means over the pairs.

    Args:
        present: 1 where a slot [b, s] holds a pair.
        rewards: rewards of the chosen and of the rejected answers, [b, s].
        logps: log-probabilities of these answers.
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
