"""Options of the methods with a teacher. Free of jax."""

from __future__ import annotations

from typing import Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive
from pydantic import ValidationInfo, field_validator

from ed_trainers.options.base import NoiseArguments, conflict
from ed_trainers.options.supervised import NextTokenArguments


class DistillationArguments(NoiseArguments):
    """Knowledge distillation (Hinton et al., arXiv:1503.02531) on given texts."""

    trainer_type: Literal["distillation"] = "distillation"
    temperature: Positive = 2.0
    """Divisor of both logits before the comparison. The divergence is multiplied by the square, so
    that gradients keep their scale."""
    alpha: Fraction = 0.9
    """Weight of the divergence in the loss; the rest is the weight of the cross-entropy of the
    labels."""
    beta: Fraction = 0.0
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence."""
    hidden_state_loss_weight: NotNegative = 0.0
    """Weight of the squared distance of the hidden states; the models must have the same width."""
    hidden_state_layers: tuple[Count, ...] | None = None
    """Layers of the student, from 1, to compare with the teacher's layers at the same relative
    depth. None: all."""
    attention_loss_weight: NotNegative = 0.0
    """Weight of the divergence of the attention weights, KL(teacher || student); the models must
    have the same number of heads (MiniLM, arXiv:2002.10957)."""
    attention_layers: tuple[Count, ...] | None = None
    """Layers of the student, from 1, whose attention is compared with the teacher's layers at the
    same relative depth. None: the last."""
    lmhead_chunksize: Count | None = None
    """Number of tokens whose logits exist at the same time; None: chosen by the loss."""

    @field_validator("hidden_state_layers", "attention_layers")
    @classmethod
    def _are_compared(
        cls, value: tuple[int, ...] | None, info: ValidationInfo
    ) -> tuple[int, ...] | None:
        kind = str(info.field_name).removesuffix("_layers")
        if value is not None and not info.data.get(f"{kind}_loss_weight", 1):
            subject = {"hidden_state": "no hidden states are", "attention": "no attention is"}[kind]
            raise conflict(f"without {kind}_loss_weight {subject} compared: set it")
        return value


class SeqKDArguments(NextTokenArguments, NoiseArguments):
    """Sequence-level distillation (Kim and Rush, arXiv:1606.07947): train on the teacher's
    answers."""

    trainer_type: Literal["seq_kd"] = "seq_kd"
    max_prompt_length: Count = 512
    """Maximum number of prompt tokens; longer prompts keep their last tokens."""
    max_completion_length: Count = 256
    """Maximum number of tokens of the teacher's answers."""
