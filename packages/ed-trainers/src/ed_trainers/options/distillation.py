"""Options of the methods with a teacher. Free of jax.

Names and defaults of `gkd`, `iw_opd` and `sdft` are TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from ed_infra.options import Count, Fraction, NotNegative, Options, Positive, Whole
from pydantic import Field, ValidationInfo, field_validator, model_validator

from ed_trainers.options.base import (
    Decisions,
    NoiseArguments,
    StrictFlag,
    TrainingArguments,
    conflict,
)
from ed_trainers.options.online import (
    OnlineArguments,
    SamplingTemperature,
    SelfDistillationArguments,
    Support,
    with_fields,
)
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


class DraftArguments(OnlineArguments):
    """Training of the MTP layer alone, which drafts tokens for the frozen model (DeepSeek-AI,
    arXiv:2412.19437), on the model's answers. Its answers do not change."""

    trainer_type: Literal["draft"] = "draft"
    learning_rate: Positive = 1e-3
    num_speculative_tokens: Annotated[int, Field(gt=0, le=16)] = 3
    """Number of tokens that the layer predicts one after the other: the depths of the loss, and the
    drafted tokens of a step in the evaluation."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Factor of the weight of each further depth in the loss."""
    alpha: Fraction = 1.0
    """Weight of the divergence of the model's distribution from the layer's; the rest is the weight
    of the cross-entropy of the model's tokens."""
    draft_vocab_size: Count | None = None
    """Number of tokens that the layer predicts, the most frequent ones of the answers so far; None:
    all. The saved model contains the counts. Give the engine the same number."""

    @property
    def trains_mtp(self) -> bool:
        """See `TrainingArguments`."""
        return True

    @property
    def trained_parameters(self) -> Decisions:
        """See `TrainingArguments`."""
        return (("^mtp", True),)

    @model_validator(mode="after")
    def _trains_the_layer(self) -> Self:
        for name in ("trainable_rules", "frozen_parameters"):
            if getattr(self, name):
                raise conflict(
                    f"draft trains the MTP layer, all of it and nothing else: omit {name}"
                )
        return self


class IWOPDArguments(OnlineArguments):
    """Importance-weighted on-policy distillation: the learner's completions are reinforced by the
    log-ratios of the teacher to the learner, of which the early ones count more."""

    trainer_type: Literal["iw_opd"] = "iw_opd"
    iw_opd_gamma: NotNegative = 0.5
    """Additional weight of the first token of a completion. It falls with the share of the
    absolute log-ratios of the earlier tokens, to 0 at the end. 0: all tokens have the weight 1."""
    iw_opd_epsilon: Positive = 1e-8
    """Smallest sum of the absolute log-ratios of a completion by which they are divided."""


#: Default of `distillation_topk` of `sdft`.
DEMONSTRATED_TOKENS = 100


class SDFTArguments(SelfDistillationArguments, OnlineArguments):
    """Self-distillation fine-tuning (Shenfeld et al., arXiv:2601.19897): the model learns from its
    own distributions, given a demonstration in its prompt."""

    ALIASES: ClassVar[Mapping[str, str]] = {"num_generations": "num_return_sequences"}

    trainer_type: Literal["sdft"] = "sdft"
    num_return_sequences: Annotated[int, Field(ge=1, le=4096)] = 8
    """Number of completions per prompt."""
    batch_unit: Literal["completions", "prompts"] = "completions"
    """The unit of `total_batch_size`: completions, or prompts, as in EasyDeL."""
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = "topk_logits"
    """Compared probabilities: those of the sampled tokens, of the vocabulary, or of the student's
    `distillation_topk` most probable tokens."""
    distillation_alpha: Fraction = 0.5
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence. `sampled_token` needs 1."""
    distillation_topk: Count | None = None
    """Number of compared tokens of `topk_logits`; None: 100."""
    teacher_model_kind: Literal["ema", "base", "live"] = "base"
    """Weights of the teacher: a running mean of the learner's, the learner's before training, or
    its present ones."""
    teacher_prompt_template: Annotated[str, with_fields("prompt", "privileged_context")] = (
        "{prompt}\n\n{privileged_context}"
    )
    """The teacher's prompt, or its last message. The field `privileged_context` of the rows has the
    demonstration."""
    generate_from_teacher: StrictFlag = False
    """Sample the completions after the teacher's prompts. The learner then has no probabilities at
    the time of sampling, so `distillation_is_clip` has no effect."""
    num_loss_tokens_to_skip: Whole = 0
    """Number of first tokens of each completion without a loss."""

    @model_validator(mode="after")
    def _compares_in_reverse(self) -> Self:
        if self.distillation_mode == "sampled_token" and self.distillation_alpha != 1:
            raise conflict(
                "the sampled tokens estimate the reverse divergence only: set distillation_alpha "
                "to 1, or use distillation_mode full_logits or topk_logits"
            )
        return self

    @property
    def rows_per_prompt(self) -> int:
        """See `OnlineArguments`."""
        return self.num_return_sequences

    @property
    def sequences_per_unit(self) -> int:
        """See `TrainingArguments`."""
        return self.rows_per_prompt if self.batch_unit == "prompts" else 1

    @property
    def keeps_old(self) -> bool:
        """Whether the rows have the learner's log-probabilities at the time of sampling."""
        return (
            self.distillation_is_clip is not None
            and not self.generate_from_teacher
            and self.updates_per_generation > 1
        )

    @property
    def support(self) -> Support | None:
        """The tokens that are compared; None: the vocabulary."""
        if self.distillation_mode != "topk_logits":
            return None
        size = self.distillation_topk or DEMONSTRATED_TOKENS
        return Support(size, self.distillation_add_tail, from_student=True)

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        out = self.list_idle_teacher_options()
        if self.generate_from_teacher:
            out["distillation_is_clip"] = "generate_from_teacher is true"
        return [*super().idle(), *out.items()]
