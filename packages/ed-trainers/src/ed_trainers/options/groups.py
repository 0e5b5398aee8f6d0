"""Options of the methods that compare several completions of a prompt. Free of jax.

Names and defaults are EasyDeL's if EasyDeL has the option, otherwise TRL's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ed_infra.options import Fraction, NotNegative, Positive, choice
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import StrictFlag, TrainingArguments, conflict
from ed_trainers.options.online import OnlineArguments, RewardedArguments, RewardNames
from ed_trainers.options.preference import AnswerArguments, SyncArguments

GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# The largest ratio of MiniMax, arXiv:2506.13585.
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
    """Number of completions per prompt, which are compared with each other."""
    epsilon: Positive = 0.2
    """Lower clipping bound of the probability ratio: 1 - `epsilon`."""
    epsilon_high: Positive | None = None
    """Upper clipping bound of the probability ratio: 1 + `epsilon_high`; None: `epsilon`. For
    `cispo` the value is the largest ratio, and None means 5."""
    mask_truncated_completions: StrictFlag = False
    """Do not train on completions that reached the maximum length."""

    @property
    def rows_per_prompt(self) -> int:
        """See `OnlineArguments`."""
        return self.num_return_sequences

    @property
    def upper(self) -> float:
        """`epsilon_high`, or its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class GRPOArguments(
    AnswerArguments, GroupArguments, RewardedArguments, OnlineArguments, SyncArguments
):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300) and its relatives."""

    trainer_type: Literal["grpo"] = "grpo"
    loss_type: Annotated[str, choice("loss_type", GRPO_LOSSES)] = "dapo"
    """Aggregation of token losses: `grpo`, the mean over each completion and then over the
    completions; `dr_grpo` (arXiv:2503.20783), a sum over `max_completion_length`; `dapo`
    (2503.14476), the mean over the tokens of a generation; `bnpo`, over the tokens of a step;
    `gspo` (2507.18071), `grpo` with `importance_sampling_level: sequence`; `cispo` (2506.13585),
    clipped weights instead of clipped ratios."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether each token or each completion has a ratio."""
    delta: Positive | None = None
    """Upper bound of the unclipped ratio of completions with negative advantages; above 1 +
    `epsilon_high`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of the group, of the batch, or
    not."""
    use_bias_correction_kl: StrictFlag = True
    """Weight the divergence from the reference with the ratio, for an unbiased gradient
    (arXiv:2512.02556)."""
    importance_sampling_correction: Annotated[
        str, choice("importance_sampling_correction", CORRECTIONS)
    ] = "token_truncate"
    """Correction of differences between the log-probabilities of the engine and of the trainer.
    `token_truncate` weights each token with the probability ratio, at most
    `importance_sampling_cap`; `token_mask` drops tokens above the cap. `sequence_truncate` and
    `sequence_mask` do the same for whole completions."""
    importance_sampling_cap: Positive = 3.0
    """Largest ratio of the correction."""
    routing_replay: StrictFlag = False
    """For models with experts: the engine records the experts of each token, and the trained model
    and the reference use these experts (arXiv:2510.11370). Without this option, rounding lets the
    trainer choose other experts for some tokens."""
    sampling_mask_replay: StrictFlag = False
    """For sampling with `top_p`, `top_k` or `min_p`: the engine records the tokens that the filters
    kept, and the trained model and the reference distribute their probability over these tokens
    (the sampling mask of DeepSeek-V3.2, arXiv:2512.02556). Without this option, the loss uses the
    whole vocabulary, and only the correction applies the filters. The masks take a bit for each
    token of the vocabulary and each position of a row."""

    @field_validator("importance_sampling_level")
    @classmethod
    def _gspo_is_of_sequences(cls, value: str, info: ValidationInfo) -> str:
        if value == "token" and info.data.get("loss_type") == "gspo":
            raise conflict("gspo has a ratio for each completion: omit it, or use grpo")
        return value

    @field_validator("delta")
    @classmethod
    def _is_above_the_clip(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None:
            return value
        if info.data.get("loss_type") == "cispo":
            raise conflict("cispo clips weights, not ratios: omit delta")
        upper = 1 + (info.data.get("epsilon_high") or info.data.get("epsilon", 0.2))
        if value <= upper:
            raise conflict(f"delta {value} is not above 1 + epsilon_high, {upper}: raise it")
        return value

    @field_validator("sampling_mask_replay")
    @classmethod
    def _has_filters(cls, value: bool, info: ValidationInfo) -> bool:
        field_values = info.data
        filters = (
            field_values.get("top_p", 1) < 1
            or field_values.get("top_k", 0)
            or field_values.get("min_p", 0)
        )
        if value and not filters:
            raise conflict(
                "sampling_mask_replay repeats the filters of the sampling, and there are none: set "
                "top_p, top_k or min_p, or omit it"
            )
        return value

    @property
    def upper(self) -> float:
        """See `GroupArguments`."""
        if self.loss_type == "cispo" and self.epsilon_high is None:
            return _CISPO_CAP
        return super().upper

    @property
    def by_sequence(self) -> bool:
        """Whether a completion has one ratio for all its tokens."""
        return self.loss_type == "gspo" or self.importance_sampling_level == "sequence"

    @property
    def corrects(self) -> bool:
        """Whether the log-probabilities of engine and trainer are compared."""
        return self.importance_sampling_correction != "none"

    @property
    def keeps_old(self) -> bool:
        """Whether the log-probabilities before the steps of a generation are computed.

        The correction compares them with the log-probabilities of the engine. Without a correction,
        one step per generation does not need them: the step computes the same values.
        """
        return self.updates_per_generation > 1 or self.corrects

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
    """Reinforcement learning with verifiable rewards: `grpo` with rewards that rules check."""

    trainer_type: Literal["rlvr"] = "rlvr"  # type: ignore[assignment]
    reward_functions: RewardNames = ("math_answer",)


class GSPOArguments(GRPOArguments):
    """Group sequence policy optimization (Zheng et al., arXiv:2507.18071): `grpo` with one ratio
    for each completion, and the defaults of the paper."""

    trainer_type: Literal["gspo"] = "gspo"  # type: ignore[assignment]
    beta: NotNegative = 0.0
    """Weight of the divergence from the reference; 0: no reference."""
    epsilon: Positive = 3e-4
    """Lower clipping bound of the probability ratio: 1 - `epsilon`. Ratios of completions are
    means over their tokens, so the bounds are narrower than those of `grpo`."""
    epsilon_high: Positive | None = 4e-4
    """Upper clipping bound of the probability ratio: 1 + `epsilon_high`; None: `epsilon`."""
    loss_type: Annotated[str, choice("loss_type", GRPO_LOSSES)] = "grpo"
    """Aggregation of the losses, as in `grpo`."""
    importance_sampling_level: Literal["token", "sequence"] = "sequence"
    """`sequence`: each completion has a ratio. `grpo` has ratios of tokens."""

    @field_validator("importance_sampling_level")
    @classmethod
    def _gspo_is_of_sequences(cls, value: str, info: ValidationInfo) -> str:
        del info
        if value == "token":
            raise conflict("gspo has a ratio for each completion: omit it, or use grpo")
        return value


class GFPOArguments(GRPOArguments):
    """Group filtered policy optimization (Shrivastava et al., arXiv:2508.09726): `grpo` on the
    completions of each group with the best filter scores."""

    ROWS_OPTION: ClassVar[str] = "num_remains_in_group"

    trainer_type: Literal["gfpo"] = "gfpo"  # type: ignore[assignment]
    num_remains_in_group: Annotated[int, Field(ge=2, le=4095)] | None = None
    """Number of completions per prompt that are trained: those with the highest filter scores among
    `num_return_sequences`. None: all, as in `grpo`. An evaluation counts all completions."""
    filter_by_length: StrictFlag = True
    """Add `length_weight` times (1 - length / `max_completion_length`) to the filter score."""
    filter_by_efficiency: StrictFlag = True
    """Add `efficiency_weight` times the reward per token to the filter score, relative to the
    largest reward per token of the generation."""
    length_weight: Fraction = 0.5
    """Weight of a short completion in the filter score."""
    efficiency_weight: Fraction = 0.5
    """Weight of the reward per token in the filter score."""

    @field_validator("num_remains_in_group")
    @classmethod
    def _removes_some(cls, value: int | None, info: ValidationInfo) -> int | None:
        size = info.data.get("num_return_sequences")
        if value is not None and size is not None and value >= size:
            raise conflict(
                f"{value} of {size} completions remain, so nothing is filtered: use fewer than "
                f"num_return_sequences ({size}), or omit it"
            )
        return value

    @field_validator("filter_by_efficiency")
    @classmethod
    def _has_a_score(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("filter_by_length") is False:
            raise conflict(
                "without filter_by_length and filter_by_efficiency there is no filter score: keep "
                "one of the two, or use grpo"
            )
        return value

    @property
    def rows_per_prompt(self) -> int:
        """See `OnlineArguments`."""
        return self.num_remains_in_group or self.num_return_sequences

    @property
    def completions_per_generation(self) -> int:
        """See `OnlineArguments`; those that the filter removes are included."""
        return self.loader_batch_size * self.num_return_sequences

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        out = super().idle()
        if self.num_remains_in_group is None:
            names = ("filter_by_length", "filter_by_efficiency", "length_weight")
            reason = "num_remains_in_group is not set: nothing is filtered, as in grpo"
            return [*out, *((n, reason) for n in ("trainer_type", *names, "efficiency_weight"))]
        for name in ("length", "efficiency"):
            if not getattr(self, f"filter_by_{name}"):
                out.append((f"{name}_weight", f"filter_by_{name} is false"))
        return out


class RLOOArguments(
    AnswerArguments, GroupArguments, RewardedArguments, OnlineArguments, SyncArguments
):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv:2402.14740)."""

    trainer_type: Literal["rloo"] = "rloo"
    beta: NotNegative = 0.05
    """Weight of the divergence from the reference, which is subtracted from the reward; 0: no
    reference."""
    normalize_advantages: StrictFlag = False
    """Normalize advantages to mean 0 and standard deviation 1 within a generation."""
    reward_clip_range: tuple[float, float] | None = None
    """Lowest and highest reward; other rewards are clipped."""

    @field_validator("reward_clip_range")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise conflict(f"{list(value)} is no range: write [lowest, highest]")
        return value
