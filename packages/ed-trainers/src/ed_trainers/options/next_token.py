"""Options of the methods whose loss is the cross-entropy of the next token. Free of jax."""

from __future__ import annotations

from ed_infra.options import Count, NotNegative

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import Share


class NextTokenArguments(TrainingArguments):
    """What shapes the cross-entropy of the next token."""

    lmhead_chunksize: Count | None = None
    """Tokens whose logits exist at once; None lets the loss choose."""
    label_smoothing_factor: Share = 0.0
    """Share of each target that is spread evenly over the vocabulary; in training only."""
    z_loss_coefficient: NotNegative = 0.0
    """Factor on the square of the log of each token's normaliser, added to its loss; in training
    only."""
