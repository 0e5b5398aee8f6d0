"""Options of `gkd`. Free of jax. Names and defaults are TRL's."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from ed_infra.options import Count, Fraction, Positive
from pydantic import ValidationInfo, field_validator

from ed_trainers.options.base import NoiseArguments, StrictFlag, conflict
from ed_trainers.options.online import OnlineArguments
from ed_trainers.options.preference import AnswerArguments


class Support(NamedTuple):
    """The tokens whose probabilities a divergence compares.

    Attributes:
        top_k: number of most probable tokens.
        add_tail: whether the probability of all other tokens is compared too; otherwise the
            probabilities of the tokens are normalized.
        of_student: whether the tokens are the student's most probable ones, or the teacher's.
    """

    top_k: int
    add_tail: bool
    from_student: bool = False


class GKDArguments(AnswerArguments, OnlineArguments, NoiseArguments):
    """Generalized knowledge distillation (Agarwal et al., arXiv:2306.13649), on-policy or not."""

    trainer_type: Literal["gkd"] = "gkd"
    temperature: Positive = 0.9
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
    def support(self) -> Support | None:
        """The tokens that are compared; None: the vocabulary."""
        return None


class OnPolicyDistillationArguments(GKDArguments):
    """On-policy distillation: `gkd` on the learner's completions only, with the reverse
    divergence."""

    trainer_type: Literal["on_policy_distillation"] = "on_policy_distillation"  # type: ignore[assignment]
    temperature: Positive = 1.0
    """Sampling temperature of the learner. The distributions of learner and teacher are compared at
    the same temperature."""
    lmbda: Fraction = 1.0
    """Always 1: the learner completes every prompt. `gkd` also reads other completions."""
    beta: Fraction = 1.0
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence."""

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


class SparseDistillationArguments(OnPolicyDistillationArguments):
    """On-policy distillation from the teacher's most probable tokens only."""

    ALIASES: ClassVar[dict[str, str]] = {
        **OnPolicyDistillationArguments.ALIASES,
        "top_k_teacher": "loss_top_k",
    }

    trainer_type: Literal["sparse_distillation"] = "sparse_distillation"  # type: ignore[assignment]
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
