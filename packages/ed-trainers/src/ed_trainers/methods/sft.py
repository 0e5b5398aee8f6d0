"""Supervised fine-tuning, which is also pre-training: the cross-entropy of the next token.

Legend: b sequences, s positions, d hidden, v vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.losses import TokenLoss

from ed_trainers.arguments import SFTArguments, TrainingArguments
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import forward
from ed_trainers.losses.token_loss import token_cross_entropy
from ed_trainers.trainer import Trainer


class SFTTrainer(Trainer):
    """Learns to predict the labels of each sequence.

    `arguments` are `SFTArguments`. See `Trainer` for the rest.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = SFTArguments
    arguments: SFTArguments

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Shift labels by one, within segments; see `next_token_batch`."""
        return next_token_batch(batch)

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the weighted sum of `-log p(target)` in nats.

        Label smoothing, z-loss and noise on embeddings are of training alone: with a key.
        """
        model, arguments = models.learner, self.arguments
        extra = TokenLoss()
        if key is not None:
            extra = TokenLoss(arguments.label_smoothing_factor, arguments.z_loss_coefficient)
        output = forward(model, batch, key, noise=arguments.neftune_noise_alpha)
        assert output.last_hidden_state is not None
        total = token_cross_entropy(
            output.last_hidden_state,
            model.head(),
            batch["targets"],
            batch["weights"],
            sharding=self.placement.sharding(batch["targets"].shape, stacked=False),
            chunk=arguments.lmhead_chunksize,
            loss=extra,
        )
        return Loss.of(output, total, jnp.sum(batch["weights"]))
