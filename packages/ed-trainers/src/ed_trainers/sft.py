"""Supervised fine-tuning, which is also pre-training: the cross-entropy of the next token.

Legend: b sequences, s positions, d hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric

from ed_trainers.arguments import SFTArguments, TrainingArguments
from ed_trainers.feed import HostBatch
from ed_trainers.token_loss import token_cross_entropy
from ed_trainers.trainer import Trainer

#: Label of a position that is not learned, as in Hugging Face.
IGNORED = -100


class SFTTrainer(Trainer):
    """Learns to predict the labels of each sequence.

    `arguments` are `SFTArguments`. See `Trainer` for the rest.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = SFTArguments
    arguments: SFTArguments

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Shift labels by one, within segments; see `next_token_batch`."""
        return next_token_batch(batch)

    def loss(
        self, model: Any, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Return the weighted sum of `-log p(target)` in nats, and metrics."""
        output = model(
            batch["input_ids"],
            segment_ids=batch["segment_ids"],
            position_ids=batch["position_ids"],
            logits_at="none",
            key=key,
        )
        total = token_cross_entropy(
            output.last_hidden_state,
            model.lm_head_weight(),
            batch["targets"],
            batch["weights"],
            sharding=self.placement.sharding(batch["targets"].shape, stacked=False),
            chunk=self.arguments.lmhead_chunksize,
        )
        weight = jnp.sum(batch["weights"])
        return total, {**output.aux, "loss": Metric.of(total, weight)}


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
    positions = _positions(segments) if positions is None else np.asarray(positions, np.int32)
    labels = np.asarray(batch.get("labels", inputs))

    learned = np.zeros(inputs.shape, bool)
    learned[:, :-1] = (
        (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (labels[:, 1:] != IGNORED)
    )
    targets = np.zeros_like(inputs)
    targets[:, :-1] = np.where(learned[:, :-1], labels[:, 1:], 0)
    weights = learned.astype(np.float32)
    if "loss_weights" in batch:
        given = np.asarray(batch["loss_weights"], np.float32)
        weights[:, :-1] = np.where(learned[:, :-1], given[:, 1:], 0.0)
    return {
        "input_ids": inputs,
        "segment_ids": segments,
        "position_ids": positions,
        "targets": targets,
        "weights": weights,
    }


def _positions(segments: np.ndarray) -> np.ndarray:
    """Count positions from 0 within each segment."""
    index = np.broadcast_to(np.arange(segments.shape[1], dtype=np.int32), segments.shape)
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return (index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)).astype(np.int32)
