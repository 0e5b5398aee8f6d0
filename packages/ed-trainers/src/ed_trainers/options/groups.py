"""Options of the methods that compare several completions of a prompt. Free of jax.

Names and defaults are EasyDeL's if EasyDeL has the option, otherwise TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from ed_infra.options import Count, Fraction, NotNegative, Positive, choice
from pydantic import Field, ValidationInfo, field_validator, model_validator

from ed_trainers.options.base import StrictFlag, conflict
from ed_trainers.options.online import (
    EntropyWeight,
    OnlineArguments,
    RewardedArguments,
    RewardNames,
    SelfDistillationArguments,
    SyncArguments,
    with_fields,
)

#: The losses of `grpo` without hard clipping of the ratio come last.
GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "luspo", "cispo", "sapo", "vespo")
_UNCLIPPED = ("cispo", "sapo", "vespo")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_OF_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_OF_ADAPTIVE_ENTROPY = (
    *("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"),
)
# The largest ratio of MiniMax, arXiv:2506.13585.
_CISPO_CAP = 5.0


class GroupArguments(RewardedArguments, SyncArguments):
    """Options that `grpo` and `rloo` share."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "group_size": "num_return_sequences",
        "num_generations": "num_return_sequences",
    }

    num_return_sequences: Annotated[int, Field(ge=2, le=4096)] = 4
    """Number of completions per prompt, which are compared with each other."""
    batch_unit: Literal["completions", "prompts"] = "completions"
    """The unit of `total_batch_size`: trained completions, or prompts, as in EasyDeL. A prompt has
    `num_return_sequences` trained completions; in `gfpo`, `num_remains_in_group`."""
    epsilon: Positive = 0.2
    """Lower clipping bound of the probability ratio: 1 - `epsilon`."""
    epsilon_high: Positive | None = None
    """Upper clipping bound of the probability ratio: 1 + `epsilon_high`; None: `epsilon`. For
    `cispo` the value is the largest ratio, and None means 5."""
    mask_truncated_completions: StrictFlag = False
    """Do not train on completions that reached the maximum length."""
    filter_groups: StrictFlag = False
    """Replace the prompts whose completions all have the same reward with further prompts (the
    dynamic sampling of DAPO, arXiv:2503.14476). An evaluation replaces no prompts."""
    filter_groups_metric: str = "reward"
    """With `filter_groups`: the compared reward, a name in `reward_functions`, or `reward`: the
    weighted sum."""
    max_num_gen_batches: Annotated[int, Field(ge=2, le=10_000)] = 10
    """With `filter_groups`: largest number of batches of prompts that a generation completes. If
    they have too few unequal groups, equal groups fill the batch."""

    @property
    def rows_per_prompt(self) -> int:
        """See `OnlineArguments`."""
        return self.num_return_sequences

    @property
    def rounds_per_generation(self) -> int:
        """See `OnlineArguments`."""
        return self.max_num_gen_batches if self.filter_groups else 1

    @property
    def sequences_per_unit(self) -> int:
        """See `TrainingArguments`."""
        return self.rows_per_prompt if self.batch_unit == "prompts" else 1

    @property
    def upper(self) -> float:
        """`epsilon_high`, or its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def list_idle_filters(self) -> list[tuple[str, str]]:
        """Return the options without effect, and the reasons, if `filter_groups` is false."""
        names = () if self.filter_groups else ("filter_groups_metric", "max_num_gen_batches")
        return [(name, "filter_groups is false") for name in names]


class GRPOArguments(GroupArguments, OnlineArguments):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300) and its relatives."""

    trainer_type: Literal["grpo"] = "grpo"
    loss_type: Annotated[str, choice("loss_type", GRPO_LOSSES)] = "dapo"
    """Aggregation of token losses: `grpo`, the mean over each completion and then over the
    completions; `dr_grpo` (arXiv:2503.20783), a sum over `max_completion_length`; `dapo`
    (2503.14476), the mean over the tokens of a generation; `bnpo`, over the tokens of a step;
    `gspo` (2507.18071), `grpo` with `importance_sampling_level: sequence`; `luspo` (2602.05261), a
    sum over each completion and a mean over the completions, which the paper combines with
    `importance_sampling_level: sequence`; `cispo` (2506.13585), clipped weights instead of clipped
    ratios; `sapo` (2511.20347), `grpo` with a sigmoid of the ratio instead of clipping; `vespo`
    (2602.10693), `dapo` with a smooth weight of the ratio of each completion."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether each token or each completion has a ratio."""
    delta: Positive | None = None
    """Upper bound of the unclipped ratio of completions with negative advantages; above 1 +
    `epsilon_high`."""
    sapo_temperature_pos: Positive = 1.0
    """Slope of the sigmoid of `sapo` for tokens with positive advantages."""
    sapo_temperature_neg: Positive = 1.05
    """Slope of the sigmoid of `sapo` for the other tokens, whose gradients become small earlier."""
    vespo_k_pos: NotNegative = 2.0
    """Power of the ratio in the weight of `vespo`, for advantages of at least 0."""
    vespo_lambda_pos: NotNegative = 3.0
    """Decay of the weight of `vespo` with the ratio, for advantages of at least 0."""
    vespo_k_neg: NotNegative = 3.0
    """Power of the ratio in the weight of `vespo`, for negative advantages."""
    vespo_lambda_neg: NotNegative = 2.0
    """Decay of the weight of `vespo` with the ratio, for negative advantages."""
    off_policy_mask_threshold: Positive | None = None
    """Completions with a negative advantage count nowhere in the policy loss if their sampled
    tokens became less probable by more than this number of nats per token (DeepSeek-V3.2,
    arXiv:2512.02556). None: all completions count."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of the group, of the batch, or
    not."""
    use_bias_correction_kl: StrictFlag = True
    """Weight the divergence from the reference with the ratio, for an unbiased gradient
    (arXiv:2512.02556)."""
    top_entropy_quantile: Fraction = 1.0
    """Share of the tokens whose policy loss counts: those with the highest entropy of a microbatch
    (arXiv:2506.01939). The divergence from the reference counts for all tokens. 1: all tokens."""
    entropy_coef: EntropyWeight = 0.0
    """Weight of the mean entropy of the tokens, which is subtracted from the loss; 0: none. With
    `top_entropy_quantile`, the mean is over the same tokens."""
    use_adaptive_entropy: StrictFlag = False
    """Change the weight of the entropy after each step (Skywork-OR1, arXiv:2505.22312): up by
    `entropy_coef_delta` if the entropy of the step is at most `entropy_target`, otherwise down. A
    step has the bonus if the entropy of the step before is at most the target. The first weight is
    `entropy_coef`. An evaluation has no bonus."""
    entropy_target: NotNegative = 0.2
    """With `use_adaptive_entropy`: the entropy, in nats per token, below which the bonus counts."""
    entropy_coef_delta: NotNegative = 0.005
    """With `use_adaptive_entropy`: the change of the weight after a step."""
    entropy_coef_min: EntropyWeight = 0.0
    """With `use_adaptive_entropy`: the smallest weight."""
    entropy_coef_max: EntropyWeight = 1.0
    """With `use_adaptive_entropy`: the largest weight."""
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
        if (loss := info.data.get("loss_type")) in _UNCLIPPED:
            raise conflict(f"{loss} does not clip ratios: omit delta")
        upper = 1 + (info.data.get("epsilon_high") or info.data.get("epsilon", 0.2))
        if value <= upper:
            raise conflict(f"delta {value} is not above 1 + epsilon_high, {upper}: raise it")
        return value

    @field_validator("entropy_coef_max")
    @classmethod
    def _is_a_range_of_weights(cls, value: float, info: ValidationInfo) -> float:
        lowest = info.data.get("entropy_coef_min", 0.0)
        if value < lowest:
            raise conflict(
                f"entropy_coef_max {value:g} is below entropy_coef_min {lowest:g}: raise it"
            )
        return value

    @field_validator("importance_sampling_correction")
    @classmethod
    def _weighs_tokens(cls, value: str, info: ValidationInfo) -> str:
        if value.startswith("sequence") and info.data.get("loss_type") == "vespo":
            raise conflict(
                "vespo multiplies the corrections of the tokens of a completion: use "
                "token_truncate, token_mask or none"
            )
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
    def has_entropy_bonus(self) -> bool:
        """Whether the loss reads the entropy."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

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
        out = super().idle() + self.list_idle_filters()
        unread = {
            "epsilon": self.loss_type in _UNCLIPPED,
            "epsilon_high": self.loss_type in ("sapo", "vespo"),
            "importance_sampling_level": self.loss_type == "vespo",
        }
        if self.loss_type != "sapo":
            unread |= dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), True)
        if self.loss_type != "vespo":
            unread |= dict.fromkeys(_OF_VESPO, True)
        reason = f"loss_type is {self.loss_type}"
        out += [(name, reason) for name, idle in unread.items() if idle]
        if not self.use_adaptive_entropy:
            out += [(name, "use_adaptive_entropy is false") for name in _OF_ADAPTIVE_ENTROPY]
        if not self.has_reference:
            out.append(("use_bias_correction_kl", "beta is 0: there is no divergence"))
        if not self.corrects:
            out.append(("importance_sampling_cap", "importance_sampling_correction is none"))
        return out


class RLVRArguments(GRPOArguments):
    """Reinforcement learning with verifiable rewards: `grpo` with rewards that rules check."""

    trainer_type: Literal["rlvr"] = "rlvr"
    reward_functions: RewardNames = ("math_answer",)


class GSPOArguments(GRPOArguments):
    """Group sequence policy optimization (Zheng et al., arXiv:2507.18071): `grpo` with one ratio
    for each completion, and the defaults of the paper."""

    trainer_type: Literal["gspo"] = "gspo"
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

    trainer_type: Literal["gfpo"] = "gfpo"
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


class RLOOArguments(GroupArguments, OnlineArguments):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv:2402.14740)."""

    trainer_type: Literal["rloo"] = "rloo"
    beta: NotNegative = 0.05
    """Weight of the divergence from the reference, which is subtracted from the reward; 0: no
    reference."""
    normalize_advantages: StrictFlag = False
    """Normalize advantages to mean 0 and standard deviation 1 within a generation."""
    reward_clip_range: tuple[float, float] | None = None
    """Lowest and highest reward; other rewards are clipped."""

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        return super().idle() + self.list_idle_filters()

    @field_validator("reward_clip_range")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise conflict(f"{list(value)} is no range: write [lowest, highest]")
        return value


#: The options of the policy loss, which has the weight 1 - `distillation_weight`.
_OF_POLICY = (
    *("beta", "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level"),
    *("scale_rewards", "use_bias_correction_kl", "importance_sampling_correction"),
    *("importance_sampling_cap", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "off_policy_mask_threshold"),
    *_OF_VESPO,
    *_OF_ADAPTIVE_ENTROPY,
)


class SDPOArguments(SelfDistillationArguments, GRPOArguments):
    """Self-distillation policy optimization (Huebotter et al., arXiv:2601.20802): the model learns
    from its own distributions, given a successful completion of the same prompt."""

    trainer_type: Literal["sdpo"] = "sdpo"
    num_return_sequences: Annotated[int, Field(ge=1, le=4096)] = 4
    """Number of completions per prompt. With 1, a successful completion teaches itself."""
    beta: NotNegative = 0.0
    """Weight of the divergence from the reference in the policy loss; 0: no reference."""
    distillation_weight: Fraction = 1.0
    """Weight of the distillation; the rest is the weight of the policy loss, which is that of
    `grpo`."""
    use_successful_as_teacher: StrictFlag = True
    """Show the teacher a successful completion of the same prompt."""
    success_reward_threshold: Annotated[float, Field(ge=-1e12, le=1e12)] = 1.0
    """Smallest reward of a successful completion."""
    dont_reprompt_on_self_success: StrictFlag | None = None
    """Never show the teacher the completion that is distilled. None: yes, if a prompt has several
    completions."""
    max_reprompt_len: Count = 10240
    """Maximum number of tokens of the teacher's prompt; longer prompts keep their last tokens. The
    positions of the model are a further limit."""
    reprompt_template: Annotated[str, with_fields("prompt", "solution", "feedback")] = (
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    )
    """The teacher's prompt, or its last message."""
    solution_template: Annotated[str, with_fields("successful_previous_attempt")] = (
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    )
    """The part of the teacher's prompt with the successful completion."""
    feedback_template: Annotated[str, with_fields("feedback_raw")] = (
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
    )
    """The part of the teacher's prompt with the feedback."""
    include_environment_feedback: StrictFlag = False
    """Show the teacher the field `privileged_context` of the rows."""
    environment_feedback_only_without_solution: StrictFlag = False
    """Show the feedback only if there is no successful completion."""
    remove_thinking_from_demonstration: StrictFlag = False
    """Remove `<think>...</think>` from the successful completion."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.distillation_mode == "topk_logits" and self.distillation_topk is None:
            raise conflict("distillation_mode topk_logits needs distillation_topk, such as 100")
        if self.num_return_sequences == 1 and self.filter_groups:
            raise conflict("a group of one completion is never unequal: omit filter_groups")
        if self.num_return_sequences == 1 and self.has_policy_loss:
            raise conflict(
                "one completion per prompt has nothing to compare it with in the policy loss: set "
                "num_return_sequences to 2 or more, or distillation_weight to 1"
            )
        if self.num_return_sequences == 1 and self.skips_self_success:
            raise conflict(
                "with one completion per prompt dont_reprompt_on_self_success leaves no successful "
                "completion to show: omit it, or set num_return_sequences to 2 or more"
            )
        if self.sync_ref_model and self.teacher_model_kind == "ema":
            raise conflict(
                "sync_ref_model and teacher_model_kind ema both follow the learner: omit "
                "sync_ref_model, or use the teacher base or live"
            )
        if self.distills and not (
            self.use_successful_as_teacher or self.include_environment_feedback
        ):
            raise conflict(
                "without use_successful_as_teacher and include_environment_feedback the teacher "
                "sees nothing that the learner does not see: set one of the two"
            )
        return self

    @property
    def skips_self_success(self) -> bool:
        """Whether the teacher never sees the completion that is distilled."""
        if self.dont_reprompt_on_self_success is None:
            return self.num_return_sequences > 1
        return self.dont_reprompt_on_self_success

    @property
    def distills(self) -> bool:
        """Whether there is a distillation."""
        return self.distillation_weight > 0

    @property
    def has_policy_loss(self) -> bool:
        """Whether there is a policy loss."""
        return self.distillation_weight < 1

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return self.has_policy_loss and super().has_reference

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        out = dict(super().idle())
        if not self.has_policy_loss:
            out |= dict.fromkeys(_OF_POLICY, "distillation_weight is 1: there is no policy loss")
        out |= self.list_idle_teacher_options()
        if not self.use_successful_as_teacher:
            reason = "use_successful_as_teacher is false"
            names = ("success_reward_threshold", "dont_reprompt_on_self_success")
            out |= dict.fromkeys((*names, "solution_template"), reason)
            out["remove_thinking_from_demonstration"] = reason
        if not self.include_environment_feedback:
            reason = "include_environment_feedback is false"
            names = ("feedback_template", "environment_feedback_only_without_solution")
            out |= dict.fromkeys(names, reason)
        return [*out.items()]
