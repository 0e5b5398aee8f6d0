"""Options of the methods that learn from a teacher. Free of jax."""

from __future__ import annotations

from typing import Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive
from pydantic import ValidationInfo, field_validator

from ed_trainers.options.base import conflict
from ed_trainers.options.next_token import NextTokenArguments
from ed_trainers.options.noise import NoiseArguments


class DistillationArguments(NoiseArguments):
    """Knowledge distillation (Hinton et al., arXiv:1503.02531) on given texts."""

    trainer_type: Literal["distillation"] = "distillation"
    temperature: Positive = 2.0
    """Both logits are divided by it before they are compared; the divergence is multiplied by its
    square, so that gradients keep their size."""
    alpha: Fraction = 0.9
    """Share of the divergence in the loss; the rest is the cross-entropy of the labels."""
    beta: Fraction = 0.0
    """Which divergence: 0 is forward, KL(teacher || student); 1 is reverse; between them is the
    generalized Jensen-Shannon divergence."""
    hidden_state_loss_weight: NotNegative = 0.0
    """Weight of the squared distance of the hidden states, in models of equal width."""
    hidden_state_layers: tuple[Count, ...] | None = None
    """Layers of the student, from 1, whose outputs are compared with those of the teacher's layers
    at the same share of its depth. None: all."""
    attention_loss_weight: NotNegative = 0.0
    """Weight of the divergence of the attention weights, KL(teacher || student), in models with
    equally many heads (MiniLM, arXiv:2002.10957)."""
    attention_layers: tuple[Count, ...] | None = None
    """Layers of the student, from 1, whose attention is compared with that of the teacher's layers
    at the same share of its depth. None: the last."""
    lmhead_chunksize: Count | None = None
    """Tokens whose logits exist at once; None lets the loss choose."""

    @field_validator("hidden_state_layers", "attention_layers")
    @classmethod
    def _are_compared(
        cls, value: tuple[int, ...] | None, info: ValidationInfo
    ) -> tuple[int, ...] | None:
        kind = str(info.field_name).removesuffix("_layers")
        if value is not None and not info.data.get(f"{kind}_loss_weight", 1):
            what = {"hidden_state": "no hidden states are", "attention": "no attention is"}[kind]
            raise conflict(f"without {kind}_loss_weight {what} compared: set it")
        return value


class SeqKDArguments(NextTokenArguments, NoiseArguments):
    """Sequence-level distillation (Kim and Rush, arXiv:1606.07947): learn the teacher's answers."""

    trainer_type: Literal["seq_kd"] = "seq_kd"
    max_prompt_length: Count = 512
    """Tokens of a prompt; of a longer one the last are kept."""
    max_completion_length: Count = 256
    """Tokens of an answer of the teacher."""
