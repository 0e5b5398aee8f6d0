"""Options of the methods that compare several completions of a prompt. Free of jax.

Names and defaults are EasyDeL's where it has them, else TRL's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ed_infra.options import NotNegative, Positive, choice
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import Flag, TrainingArguments, conflict
from ed_trainers.options.online import OnlineArguments, RewardedArguments, RewardNames
from ed_trainers.options.preference import AnswerArguments
from ed_trainers.options.sync import SyncArguments

GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# MiniMax's, arXiv:2506.13585: there it is the largest ratio itself.
_CISPO_CAP = 5.0


class GroupArguments(TrainingArguments):
    """Options that `grpo` and `rloo` share."""

    ALIASES: ClassVar[dict[str, str]] = {
        **OnlineArguments.ALIASES,
        **RewardedArguments.ALIASES,
        "group_size": "num_return_sequences",
        "num_generations": "num_return_sequences",
    }

    num_return_sequences: Annotated[int, Field(ge=2, le=4096)] = 4
    """Completions of each prompt, which are compared with each other."""
    epsilon: Positive = 0.2
    """How far a ratio of probabilities may fall below 1 before it is clipped."""
    epsilon_high: Positive | None = None
    """How far it may rise above 1; None is `epsilon`. For `cispo` it is the largest ratio, and None
    is 5."""
    mask_truncated_completions: Flag = False
    """Learn nothing from completions that the longest length cut."""

    @property
    def rows_per_prompt(self) -> int:
        """See `OnlineArguments`."""
        return self.num_return_sequences

    @property
    def upper(self) -> float:
        """`epsilon_high`, or what stands for it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class GRPOArguments(
    AnswerArguments, GroupArguments, RewardedArguments, OnlineArguments, SyncArguments
):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300) and its relatives."""

    trainer_type: Literal["grpo"] = "grpo"
    loss_type: Annotated[str, choice("loss_type", GRPO_LOSSES)] = "dapo"
    """How tokens make a loss: `grpo`, a mean over each completion and then over these; `dr_grpo`
    (arXiv:2503.20783), a sum over `max_completion_length`; `dapo` (2503.14476), a mean over the
    tokens of a generation; `bnpo`, over those of a step; `gspo` (2507.18071), `grpo` with
    `importance_sampling_level: sequence`; `cispo` (2506.13585), clipped weights in place of clipped
    ratios."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether each token has its ratio, or a completion one."""
    delta: Positive | None = None
    """Upper bound of the ratio that is not clipped otherwise, of bad completions; above
    1 + `epsilon_high`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of a group, of all, or of none."""
    use_bias_correction_kl: Flag = True
    """Weight the divergence from the reference with the ratio, so that its gradient has no bias
    (arXiv:2512.02556)."""
    importance_sampling_correction: Annotated[
        str, choice("importance_sampling_correction", CORRECTIONS)
    ] = "token_truncate"
    """What is done about the difference between the log-probabilities of the engine and of the
    trainer: weight each token with the ratio of the probabilities, at most
    `importance_sampling_cap`; drop the tokens above that (`token_mask`); the same of whole
    completions; nothing."""
    importance_sampling_cap: Positive = 3.0
    """Largest ratio of that correction."""

    @field_validator("importance_sampling_level")
    @classmethod
    def _gspo_is_of_sequences(cls, value: str, info: ValidationInfo) -> str:
        if value == "token" and info.data.get("loss_type") == "gspo":
            raise conflict("gspo has a ratio for each completion: leave it out, or take grpo")
        return value

    @field_validator("delta")
    @classmethod
    def _is_above_the_clip(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None:
            return value
        if info.data.get("loss_type") == "cispo":
            raise conflict("cispo clips weights, not ratios: leave delta out")
        upper = 1 + (info.data.get("epsilon_high") or info.data.get("epsilon", 0.2))
        if value <= upper:
            raise conflict(f"delta {value} is not above 1 + epsilon_high, {upper}: raise it")
        return value

    @property
    def upper(self) -> float:
        """See `GroupArguments`."""
        if self.loss_type == "cispo" and self.epsilon_high is None:
            return _CISPO_CAP
        return super().upper

    @property
    def by_sequence(self) -> bool:
        """Whether a completion has one ratio."""
        return self.loss_type == "gspo" or self.importance_sampling_level == "sequence"

    @property
    def corrects(self) -> bool:
        """Whether the log-probabilities of engine and trainer are compared."""
        return self.importance_sampling_correction != "none"

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        out = super().idle()
        if self.loss_type == "cispo":
            out.append(("epsilon", "cispo has no lower bound"))
        if not self.has_reference:
            out.append(("use_bias_correction_kl", "beta is 0: there is no divergence"))
        if not self.corrects:
            out.append(("importance_sampling_cap", "importance_sampling_correction is none"))
        return out


class RLVRArguments(GRPOArguments):
    """Reinforcement learning with verifiable rewards: `grpo` whose rewards are checked by rules."""

    trainer_type: Literal["rlvr"] = "rlvr"  # type: ignore[assignment]
    reward_functions: RewardNames = ("math_answer",)


class RLOOArguments(
    AnswerArguments, GroupArguments, RewardedArguments, OnlineArguments, SyncArguments
):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv:2402.14740)."""

    trainer_type: Literal["rloo"] = "rloo"
    beta: NotNegative = 0.05
    """How much the divergence from the reference is taken off a reward; 0 reads no reference."""
    normalize_advantages: Flag = False
    """Give advantages the mean 0 and the standard deviation 1 within a generation."""
    reward_clip_range: tuple[float, float] | None = None
    """Lowest and highest reward; rewards beyond are clipped."""

    @field_validator("reward_clip_range")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise conflict(f"{list(value)} is no range: write [lowest, highest]")
        return value
