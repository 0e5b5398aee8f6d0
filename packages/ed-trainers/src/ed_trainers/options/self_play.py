"""Options of the methods that compare completions with those of another policy. Free of jax.

Names and defaults are TRL's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ed_infra.options import Fraction, NotNegative, Positive, choice
from pydantic import ValidationInfo, field_validator

from ed_trainers.options.base import TrainingArguments, conflict
from ed_trainers.options.online import OnlineArguments, RewardedArguments
from ed_trainers.options.preference import AnswerArguments, SyncArguments

XPO_LOSSES = ("sigmoid", "ipo")


class SelfPlayArguments(TrainingArguments):
    """Options of `xpo` and `nash_md`."""

    ALIASES: ClassVar[dict[str, str]] = {
        **OnlineArguments.ALIASES,
        **RewardedArguments.ALIASES,
    }

    beta: Positive = 0.1
    """Weight of log-ratios to the reference: a higher value keeps the model nearer to the
    reference."""
    judge: str | None = None
    """Function that compares two completions of each prompt, instead of scores:
    `path/file.py:function` or `module:function`, found and called like reward functions. It
    receives `completions` of the learner and `others` of the other policy, and returns for each
    prompt the probability that the learner's completion is better."""
    missing_eos_penalty: NotNegative | None = None
    """Subtracted from the score of a completion that reached the maximum length."""

    @field_validator("judge")
    @classmethod
    def _no_scores(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("reward_functions"):
            raise conflict("judge compares completions, reward_functions score them: set one")
        return value

    @field_validator("missing_eos_penalty")
    @classmethod
    def _is_taken_off(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("judge") is not None:
            raise conflict(
                "missing_eos_penalty is subtracted from scores, and a judge returns no scores"
            )
        return value


class XPOArguments(
    AnswerArguments, SelfPlayArguments, RewardedArguments, OnlineArguments, SyncArguments
):
    """Exploratory preference optimization (Xie et al., arXiv:2405.21046)."""

    trainer_type: Literal["xpo"] = "xpo"
    alpha: NotNegative = 1e-5
    """Weight of the exploration term, which lowers the probability of the reference's
    completions."""
    loss_type: Annotated[str, choice("loss_type", XPO_LOSSES)] = "sigmoid"
    """The loss of a pair, as in `dpo`."""


class NashMDArguments(
    AnswerArguments, SelfPlayArguments, RewardedArguments, OnlineArguments, SyncArguments
):
    """Nash learning from human feedback by mirror descent (Munos et al., arXiv:2312.00886)."""

    trainer_type: Literal["nash_md"] = "nash_md"
    mixture_coef: Fraction = 0.5
    """Weight of the reference in the geometric mixture that the learner competes with: 0 is the
    learner, 1 the reference."""
