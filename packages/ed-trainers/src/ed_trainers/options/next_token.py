"""Options of the methods whose loss is the cross-entropy of the next token. Free of jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ed_infra.options import Count, NotNegative

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import FractionBelowOne


class NextTokenArguments(TrainingArguments):
    """Options of the cross-entropy of the next token."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **TrainingArguments.ALIASES,
        "label_smoothing": "label_smoothing_factor",
        "z_loss": "z_loss_coefficient",
    }
    EQUIVALENT: ClassVar[Mapping[str, str]] = {
        **TrainingArguments.EQUIVALENT,
        "loss_config": "label_smoothing_factor and z_loss_coefficient",
    }

    lmhead_chunksize: Count | None = None
    """Number of tokens whose logits exist at the same time; None: chosen by the loss."""
    label_smoothing_factor: FractionBelowOne = 0.0
    """Share of each target that is distributed over the whole vocabulary, in training only."""
    z_loss_coefficient: NotNegative = 0.0
    """Weight of the squared log of each token's softmax normalizer in the loss, in training
    only."""
