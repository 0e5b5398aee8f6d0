"""Options of `gkd`. Free of jax. Names and defaults are TRL's."""

from __future__ import annotations

from typing import Literal

from ed_infra.options import Fraction, Positive
from pydantic import ValidationInfo, field_validator

from ed_trainers.options.base import Flag, conflict
from ed_trainers.options.noise import NoiseArguments
from ed_trainers.options.online import OnlineArguments
from ed_trainers.options.preference import AnswerArguments


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
    seq_kd: Flag = False
    """Whether the teacher completes the prompts that the learner does not complete."""

    @field_validator("seq_kd")
    @classmethod
    def _are_completed(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("lmbda") == 1:
            raise conflict("with lmbda 1 the learner completes every prompt: seq_kd has no effect")
        return value
