"""Options of the methods with a teacher. Free of jax. Names and defaults of `gkd` are TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from ed_infra.options import Count, Fraction, NotNegative, Options, Positive
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import NoiseArguments, StrictFlag, TrainingArguments, conflict
from ed_trainers.options.online import OnlineArguments, SamplingTemperature
from ed_trainers.options.supervised import NextTokenArguments


class DistillationArguments(NoiseArguments, TrainingArguments):
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


class SeqKDArguments(NoiseArguments, NextTokenArguments):
    """Sequence-level distillation (Kim and Rush, arXiv:1606.07947): train on the teacher's
    answers."""

    trainer_type: Literal["seq_kd"] = "seq_kd"
    max_prompt_length: Count = 512
    """Maximum number of prompt tokens; longer prompts keep their last tokens."""
    max_completion_length: Count = 256
    """Maximum number of tokens of the teacher's answers."""


class Support(NamedTuple):
    """The tokens whose probabilities a divergence compares.

    Attributes:
        top_k: number of most probable tokens.
        add_tail: whether the probability of all other tokens is compared too; otherwise the
            probabilities of the tokens are normalized.
        from_student: whether the tokens are the student's most probable ones, or the teacher's.
    """

    top_k: int
    add_tail: bool
    from_student: bool = False


class GKDArguments(NoiseArguments, OnlineArguments):
    """Generalized knowledge distillation (Agarwal et al., arXiv:2306.13649), on-policy or not."""

    trainer_type: Literal["gkd"] = "gkd"
    temperature: SamplingTemperature = 0.9
    """Sampling temperature of learner and teacher; their distributions are compared at temperature
    1."""
    lmbda: Fraction = 0.5
    """Share of the generations that the learner completes. The completions of the others are from
    the teacher (`seq_kd`), or from the field `completion` of the data."""
    beta: Fraction = 0.5
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence."""
    seq_kd: StrictFlag = False
    """Whether the teacher completes the prompts that the learner does not complete."""

    @field_validator("seq_kd")
    @classmethod
    def _are_completed(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("lmbda") == 1:
            raise conflict("with lmbda 1 the learner completes every prompt: seq_kd has no effect")
        return value

    @property
    def loss_temperature(self) -> float:
        """Divisor of the logits before the comparison."""
        return 1.0

    @property
    def divergence_weight(self) -> float:
        """Factor of the divergence in the loss."""
        return 1.0

    @property
    def support(self) -> Support | None:
        """The tokens that are compared; None: the vocabulary."""
        return None


class OnPolicyArguments(Options):
    """Options of the methods that distill the learner's completions only."""

    temperature: SamplingTemperature = 1.0
    """Sampling temperature of the learner. The distributions of learner and teacher are compared at
    the same temperature."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of the divergence, which is the whole loss: completions have no labels. The weight
    therefore scales the loss and its gradient."""
    lmbda: Fraction = 1.0
    """Always 1: the learner completes every prompt. `gkd` also reads other completions."""

    @field_validator("lmbda")
    @classmethod
    def _is_on_policy(cls, value: float) -> float:
        if value != 1:
            raise conflict("the learner completes every prompt: omit lmbda, or use gkd")
        return value

    @property
    def loss_temperature(self) -> float:
        """See `GKDArguments`."""
        return self.temperature

    @property
    def divergence_weight(self) -> float:
        """See `GKDArguments`."""
        return self.alpha


class OnPolicyDistillationArguments(OnPolicyArguments, GKDArguments):
    """On-policy distillation: `gkd` on the learner's completions only, with the reverse
    divergence."""

    trainer_type: Literal["on_policy_distillation"] = "on_policy_distillation"
    beta: Fraction = 1.0
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence."""


class SparseDistillationArguments(OnPolicyArguments, GKDArguments):
    """On-policy distillation from the teacher's most probable tokens only."""

    ALIASES: ClassVar[Mapping[str, str]] = {"top_k_teacher": "loss_top_k"}

    trainer_type: Literal["sparse_distillation"] = "sparse_distillation"
    beta: Fraction = 0.0
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence."""
    loss_top_k: Count = 20
    """Number of most probable tokens of the teacher, whose probabilities are compared."""
    loss_add_tail: StrictFlag = True
    """Also compare the total probability of all other tokens. False: the probabilities of the
    compared tokens are normalized to the sum 1."""

    @property
    def support(self) -> Support | None:
        """See `GKDArguments`."""
        return Support(self.loss_top_k, self.loss_add_tail)
