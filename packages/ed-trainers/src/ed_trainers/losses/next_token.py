"""Batches of the next token: labels shifted once. Legend: b sequences, s positions."""

from __future__ import annotations

import numpy as np
from ed_infra.errors import ConfigError
from ed_models.tasks.causal_lm import next_token_targets

from ed_trainers.batches import HostBatch


def next_token_batch(batch: HostBatch) -> dict[str, np.ndarray]:
    """Make targets and weights of a batch: the shift of the labels happens here, once.

    Position t learns the label of position t + 1, unless that one is ignored (-100), padding, or
    in another segment.

    Args:
        batch: `input_ids` int [b, s]; optionally `labels` (default: the inputs), `segment_ids`
            (default: `attention_mask`, else one segment a row), `position_ids` (default: counted
            within each segment), `loss_weights` float [b, s], of the token that is predicted.

    Returns:
        `input_ids`, `segment_ids`, `position_ids`, `targets` int32 [b, s], `weights` float32
        [b, s]; a target whose weight is 0 is 0.

    Raises:
        ConfigError: `input_ids` is missing, or shapes differ.
    """
    if "input_ids" not in batch:
        raise ConfigError(f"a batch has no input_ids, only {', '.join(sorted(batch))}")
    inputs = np.ascontiguousarray(batch["input_ids"], np.int32)
    shaped = ("labels", "segment_ids", "attention_mask", "position_ids", "loss_weights")
    for name in shaped:
        if name in batch and np.shape(batch[name]) != inputs.shape:
            raise ConfigError(
                f"{name} has shape {np.shape(batch[name])}, input_ids has {inputs.shape}"
            )
    segments = batch.get("segment_ids", batch.get("attention_mask"))
    segments = np.ones_like(inputs) if segments is None else np.asarray(segments, np.int32)
    positions = batch.get("position_ids")
    if positions is None:
        positions = np.where(segments > 0, places_in_segments(segments), 0)
    labels = np.asarray(batch.get("labels", inputs), np.int32)
    targets, weights = next_token_targets(labels, segments)
    if "loss_weights" in batch:
        following = np.roll(np.asarray(batch["loss_weights"], np.float32), -1, axis=1)
        weights = np.where(weights > 0, following, np.float32(0))
    return {
        "input_ids": inputs,
        "segment_ids": segments,
        "position_ids": np.asarray(positions, np.int32),
        "targets": targets,
        "weights": weights,
    }


def places_in_segments(segment_ids: np.ndarray) -> np.ndarray:
    """Count the positions of each segment from 0: `ed_infra.masks.segment_index` on the host.

    A device would have to be waited for, once a step.
    """
    reached = np.maximum.accumulate(segment_ids, axis=1)
    begins = np.diff(reached, axis=1, prepend=0) > 0
    places = np.arange(segment_ids.shape[1], dtype=np.int32)
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
