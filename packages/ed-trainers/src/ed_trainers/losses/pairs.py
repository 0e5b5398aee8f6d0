"""Pairs of a better and a worse answer: stacked in one batch, scored in one forward pass.

A loader yields `chosen_*` and `rejected_*`, [b, s] each; the two answers of a pair have the same
segment number in the same row. Stacked arrays [b, 2, s] keep both answers in the same microbatch
and on the same device. A model reads them as [2 b, s].

`choice_batch` stacks any number of texts of a row in the same manner.

Legend: b rows, n texts of a row, s positions and slots of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import CausalLMOutput, Metric
from ed_infra.sharding.axes import LogicalAxes
from ed_models.protocol import LanguageModel

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, MethodRun, Models, Prepared
from ed_trainers.losses.next_token import further_arrays, next_token_batch, sequence_arrays
from ed_trainers.losses.scoring import learner_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.placement import TOKENS, with_arrays

SIDES = ("chosen", "rejected")
#: Figures in the terminal and the summary.
PAIR_COLUMNS = ("loss", "rewards/accuracies", "rewards/margins")
#: Name of the factors of log-probabilities of tokens, see `discount_tails`.
TOKEN_SHARES = "token_shares"
#: Arrays of the encoder, which reads the prompts.
_PROMPTS = ("input_ids", "segment_ids", "position_ids", "attention_mask")


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


def pair_batch(
    batch: HostBatch, sides: tuple[str, ...] = SIDES, model: LanguageModel | None = None
) -> Inputs[np.ndarray]:
    """Stack the sides of a loader's batch, with targets and weights; see `next_token_batch`.

    For an encoder-decoder, a batch has the prompts as arrays of the encoder (`input_ids`,
    `segment_ids`, `position_ids`), and each side contains tokens of the decoder.

    Args:
        batch: `<side>_input_ids`, … for each side; and the images of the prompts, which both sides
            read.
        sides: names of the sides: two answers, or several texts.
        model: the trained model; its `input_names` show whether it is an encoder-decoder.

    Returns:
        `input_ids`, `segment_ids`, `position_ids`, `targets`, `weights`, each [b, 2, s] for two
        sides, and the further arrays that all sides have.

    Raises:
        ConfigError: a side is missing, or the shapes of the sides differ.
    """
    side_batches = []
    for side in sides:
        lead = f"{side}_"
        side_arrays = {
            name.removeprefix(lead): v for name, v in batch.items() if name.startswith(lead)
        }
        if "input_ids" not in side_arrays:
            raise ConfigError(
                f"a batch of pairs has {sides[0]}_input_ids and {sides[1]}_input_ids, not only "
                f"{', '.join(sorted(batch))}: use rows with {' and '.join(sides)}"
            )
        if model is not None and "decoder_input_ids" in model.input_names:
            side_arrays = _build_decoder_side(side_arrays, batch)
        elif model is not None:
            shared = {name: batch[name] for name in model.input_names if name in batch}
            side_arrays = {**shared, **side_arrays}
        side_batches.append(next_token_batch(side_arrays, model))
    shapes = [part["input_ids"].shape for part in side_batches]
    wrong = [(side, shape) for side, shape in zip(sides, shapes, strict=True) if shape != shapes[0]]
    if wrong:
        raise ConfigError(
            f"{sides[0]}_input_ids has shape {shapes[0]}, {wrong[0][0]}_input_ids {wrong[0][1]}: "
            "the texts of a pair must be in the same row"
        )
    shared_names = [name for name in side_batches[0] if all(name in part for part in side_batches)]
    arrays = {
        name: np.stack([part[name] for part in side_batches], axis=1) for name in shared_names
    }
    return Inputs(
        arrays,
        {name: get_pair_axes(side_batches[0].get_logical_axes(name)) for name in shared_names},
    )


def _build_decoder_side(side: dict[str, np.ndarray], batch: HostBatch) -> dict[str, np.ndarray]:
    """Return the arrays of one side for an encoder-decoder, whose encoder reads the prompts."""
    if "input_ids" not in batch:
        raise ConfigError(
            "a batch of pairs of an encoder-decoder has input_ids, the tokens of the prompts, not "
            f"only {', '.join(sorted(batch))}: use rows with prompt, chosen and rejected"
        )
    prompts = {name: batch[name] for name in _PROMPTS if name in batch}
    tokens = np.asarray(side["input_ids"], np.int32)
    segments = np.asarray(side.get("segment_ids", np.ones_like(tokens)), np.int32)
    labels = np.asarray(side.get("labels", tokens), np.int32)
    answer = {"labels": np.where(segments > 0, labels, -100), "decoder_segment_ids": segments}
    if "position_ids" in side:
        answer["decoder_position_ids"] = side["position_ids"]
    return {**prompts, **answer}


def discount_tails(pairs: Prepared, share: float) -> Prepared:
    """Add the factors of log-probabilities of tokens, [b, 2, s]: 1, or a share for tokens beyond
    the length of the shorter answer of their pair.

    Args:
        pairs: a batch of `pair_batch`.
        share: 0 to 1.
    """
    segments = pairs["decoder_segment_ids" if "decoder_segment_ids" in pairs else "segment_ids"]
    counted = (pairs["weights"] > 0).astype(np.int32)
    totals = np.cumsum(counted, axis=-1)
    begins = np.diff(segments, axis=-1, prepend=0) != 0
    earlier = np.maximum.accumulate(np.where(begins, totals - counted, 0), axis=-1)
    lengths = np.zeros((*segments.shape[:2], segments.shape[-1] + 1), np.int32)
    rows, sides, places = np.nonzero(counted)
    np.add.at(lengths, (rows, sides, segments[rows, sides, places]), 1)
    shared_lengths = np.broadcast_to(lengths.min(axis=1, keepdims=True), lengths.shape)
    places_in_answers = np.where(counted, totals - earlier, 0)
    beyond = places_in_answers > np.take_along_axis(shared_lengths, segments, axis=-1)
    shares = np.where(beyond, np.float32(share), np.float32(1))
    return with_arrays(pairs, pairs.get_logical_axes("weights"), **{TOKEN_SHARES: shares})


def get_slots(rows: Mapping[str, jax.Array]) -> jax.Array:
    """Return the segment of each target of rows: those of the decoder, if there is one."""
    return rows["decoder_segment_ids" if "decoder_segment_ids" in rows else "segment_ids"]


def get_pair_axes(axes: LogicalAxes = TOKENS) -> LogicalAxes:
    """Return the axes of an array [b, 2, ...] from the axes of one side, [b, ...]."""
    return (axes[0], None, *axes[1:])


def as_rows(batch: Mapping[str, jax.Array]) -> Batch:
    """Return the arrays [b, 2, ...] as rows for a model, [2 b, ...]."""
    return Inputs({name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()})


def by_side(answers: Answers) -> tuple[Answers, Answers]:
    """Split the answers of rows [2 b, s] into chosen and rejected ones, [b, s] each."""
    logps, tokens = (split_sides(rows) for rows in answers)
    return Answers(logps[0], tokens[0]), Answers(logps[1], tokens[1])


def split_sides(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split rows [2 b, s] into the rows of the chosen and of the rejected answers, [b, s] each."""
    stacked = rows.reshape(-1, 2, rows.shape[-1])
    return stacked[:, 0], stacked[:, 1]


def score_pairs(run: MethodRun, models: Models, batch: Batch, key: jax.Array | None) -> ScoredPairs:
    """Return the log-probabilities of both answers of each pair under the learner."""
    rows = as_rows(batch)
    output, token_logps = learner_logps(run, models, rows, key)
    counted_logps = token_logps * rows.get(TOKEN_SHARES, 1.0)
    chosen, rejected = by_side(Answers.of(counted_logps, rows["weights"], get_slots(rows)))
    present = chosen.present * rejected.present
    return ScoredPairs(rows, output, token_logps, chosen, rejected, present)


def compute_smoothed_losses(scores: jax.Array, smoothing: float) -> jax.Array:
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


#: Arrays of a text that are no inputs of a model here.
_READ = ("labels", "attention_mask")


def choice_batch(batch: HostBatch, names: tuple[str, ...]) -> Inputs[np.ndarray]:
    """Stack the texts of each row: `input_ids`, `segment_ids`, … int [b, n, s].

    Args:
        batch: `<name>_input_ids`, … for each name.
        names: names of the texts.

    Raises:
        ConfigError: a text is missing.
    """
    choices = []
    for name in names:
        lead = f"{name}_"
        text_arrays = {
            key.removeprefix(lead): v for key, v in batch.items() if key.startswith(lead)
        }
        if "input_ids" not in text_arrays:
            raise ConfigError(
                f"a batch of {len(names)} texts for each row has {names[0]}_input_ids to "
                f"{names[-1]}_input_ids, not only {', '.join(sorted(batch))}"
            )
        arrays = sequence_arrays(text_arrays)
        choices.append({**arrays, **further_arrays(text_arrays, {*arrays, *_READ})})
    stacked = {name: np.stack([part[name] for part in choices], axis=1) for name in choices[0]}
    return Inputs(stacked, dict.fromkeys(stacked, get_pair_axes()))
