"""Options of `sdpo`. Free of jax. Names and defaults are TRL's."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, ClassVar, Literal, Self

from ed_infra.options import Count, Fraction, NotNegative, Positive
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from ed_trainers.options.base import StrictFlag, conflict
from ed_trainers.options.gkd import Support
from ed_trainers.options.groups import GRPOArguments
from ed_trainers.options.optimizers import Steps
from ed_trainers.options.preference import Mixup

#: The options of the policy loss, which has the weight 1 - `distillation_weight`.
_OF_POLICY = (
    *("beta", "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level"),
    *("scale_rewards", "use_bias_correction_kl", "importance_sampling_correction"),
    "importance_sampling_cap",
)


def _with_fields(*names: str) -> AfterValidator:
    """Return a validator of a template with exactly these fields."""

    def check(text: str) -> str:
        try:
            template_fields = {
                name for _, name, _, _ in Formatter().parse(text) if name is not None
            }
        except ValueError as error:
            raise conflict(f"{text!r} is no template: {error}") from error
        if template_fields != {*names}:
            expected_fields = ", ".join(f"{{{name}}}" for name in names)
            raise conflict(f"{text!r} must have the fields {expected_fields}, and no others")
        return text

    return AfterValidator(check)


class SDPOArguments(GRPOArguments):
    """Self-distillation policy optimization (Huebotter et al., arXiv:2601.20802): the model learns
    from its own distributions, given a successful completion of the same prompt."""

    EQUIVALENT: ClassVar[dict[str, str]] = {
        **GRPOArguments.EQUIVALENT,
        "distillation_type": "distillation_mode, and distillation_alpha: 1 is kl, 0.5 is jsd",
        "max_feedback_length": "max_reprompt_len: the tokens of the teacher's whole prompt",
        "use_teacher_server": "omit it: the teacher is always on the devices of the run",
    }

    trainer_type: Literal["sdpo"] = "sdpo"  # type: ignore[assignment]
    beta: NotNegative = 0.0
    """Weight of the divergence from the reference in the policy loss; 0: no reference."""
    distillation_weight: Fraction = 1.0
    """Weight of the distillation; the rest is the weight of the policy loss, which is that of
    `grpo`."""
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = "sampled_token"
    """Compared probabilities: those of the sampled tokens, of the vocabulary, or of the student's
    `distillation_topk` most probable tokens."""
    distillation_alpha: Fraction = 1.0
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence. `sampled_token` needs 1."""
    distillation_topk: Count | None = None
    """Number of compared tokens of `topk_logits`."""
    distillation_add_tail: StrictFlag = False
    """`topk_logits`: also compare the total probability of all other tokens. False: the
    probabilities of the compared tokens are normalized to the sum 1."""
    distillation_is_clip: Positive | None = 2.0
    """Largest ratio of the learner's probability of a token to that when the token was sampled,
    which weights the distillation of the token. None: no weights."""
    teacher_model_kind: Literal["ema", "base", "live"] = "ema"
    """Weights of the teacher: a running mean of the learner's, the learner's before training, or
    its present ones."""
    teacher_update_rate: Mixup = 0.05
    """Weight of the learner in each update of the teacher `ema`."""
    teacher_sync_steps: Steps = 1
    """Steps between two updates of the teacher `ema`."""
    use_successful_as_teacher: StrictFlag = True
    """Show the teacher a successful completion of the same prompt."""
    success_reward_threshold: Annotated[float, Field(ge=-1e12, le=1e12)] = 1.0
    """Smallest reward of a successful completion."""
    dont_reprompt_on_self_success: StrictFlag = True
    """Never show the teacher the completion that is distilled."""
    max_reprompt_len: Count = 10240
    """Maximum number of tokens of the teacher's prompt; longer prompts keep their last tokens. The
    positions of the model are a further limit."""
    reprompt_template: Annotated[str, _with_fields("prompt", "solution", "feedback")] = (
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    )
    """The teacher's prompt, or its last message."""
    solution_template: Annotated[str, _with_fields("successful_previous_attempt")] = (
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    )
    """The part of the teacher's prompt with the successful completion."""
    feedback_template: Annotated[str, _with_fields("feedback_raw")] = (
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
    )
    """The part of the teacher's prompt with the feedback."""
    include_environment_feedback: StrictFlag = False
    """Show the teacher the field `privileged_context` of the data, which `additional_fields` of the
    inform names."""
    environment_feedback_only_without_solution: StrictFlag = False
    """Show the feedback only if there is no successful completion."""
    remove_thinking_from_demonstration: StrictFlag = False
    """Remove `<think>...</think>` from the successful completion."""

    @field_validator("distillation_alpha")
    @classmethod
    def _is_reverse(cls, value: float, info: ValidationInfo) -> float:
        if value != 1 and info.data.get("distillation_mode", "sampled_token") == "sampled_token":
            raise conflict(
                "the sampled tokens estimate the reverse divergence only: omit "
                "distillation_alpha, or use distillation_mode full_logits or topk_logits"
            )
        return value

    @field_validator("distillation_topk", "distillation_add_tail")
    @classmethod
    def _has_a_support(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("distillation_mode") != "topk_logits":
            raise conflict(f"only distillation_mode topk_logits reads {info.field_name}: omit it")
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.distillation_mode == "topk_logits" and self.distillation_topk is None:
            raise conflict("distillation_mode topk_logits needs distillation_topk, such as 100")
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

    @property
    def support(self) -> Support | None:
        """The tokens that are compared; None: the vocabulary."""
        if self.distillation_topk is None:
            return None
        return Support(self.distillation_topk, self.distillation_add_tail, from_student=True)

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        out = dict(super().idle())
        if not self.has_policy_loss:
            out |= dict.fromkeys(_OF_POLICY, "distillation_weight is 1: there is no policy loss")
        if self.teacher_model_kind != "ema":
            reason = f"the teacher is {self.teacher_model_kind}"
            out |= {"teacher_update_rate": reason, "teacher_sync_steps": reason}
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
