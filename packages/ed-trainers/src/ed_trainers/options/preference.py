"""Options of the methods that compare or label given answers. Free of jax.

Names and defaults are EasyDeL's if EasyDeL has the option, otherwise TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive, choice
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ed_trainers.options.base import (
    Mixup,
    NoiseArguments,
    StrictFlag,
    TrainingArguments,
    conflict,
)
from ed_trainers.options.online import SyncArguments
from ed_trainers.options.optimizers import Steps

#: Losses of `dpo`; `DPO_ALIASES` has shorter spellings.
DPO_LOSSES = (
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "discopop",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
    "sft",
)
DPO_ALIASES = {"exo": "exo_pair", "nca": "nca_pair", "sppo": "sppo_hard", "kto_pair": "bco_pair"}
#: The losses of `dpo` with `label_smoothing`.
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")
#: The losses of `dpo` that compare the log-ratios of all pairs of a step, in their order.
TRANSPORTED = ("aot", "aot_unpaired")
#: The losses of `dpo` of the difference of two scores, which a divergence may define.
_OF_DIFFERENCES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"),
)
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_CHECK_LOSS = choice("loss_type", DPO_LOSSES, DPO_ALIASES)


def _check_losses(value: object) -> object:
    """Return the names of one or several losses."""
    if isinstance(value, list | tuple):
        names = tuple(_CHECK_LOSS.func(name) for name in value)
        return names[0] if len(names) == 1 else names
    return _CHECK_LOSS.func(value)


CPO_LOSSES = ("sigmoid", "hinge", "ipo", "simpo")

#: With half of the labels wrong, the labels would contain no information.
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class AnswerArguments(NoiseArguments, TrainingArguments):
    """Options of methods that compute log-probabilities of given answers."""

    DEFAULT_LENGTH = 1024
    learning_rate: Positive = 1e-6
    lmhead_chunksize: Count | None = None
    """Number of tokens whose logits exist at the same time; None: chosen by the loss."""


class ReferenceArguments(SyncArguments):
    """Options of methods that compare answers with those of a reference."""

    beta: Positive = 0.1
    """Weight of log-ratios to the reference: a higher value keeps the model nearer to the
    reference."""
    precompute_ref_log_probs: StrictFlag = False
    """Compute the reference's log-probabilities before training, store them next to the
    checkpoints, and release the reference."""

    @field_validator("precompute_ref_log_probs")
    @classmethod
    def _stays_as_it_is(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("sync_ref_model"):
            raise conflict(
                "sync_ref_model changes the reference, so it cannot be computed in advance: set "
                "one of the two"
            )
        return value

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return True

    @property
    def without_reference(self) -> str:
        """Name of the option that disables the reference, for messages."""
        return "reference_free"


class DPOArguments(ReferenceArguments, AnswerArguments):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290) and related losses."""

    DEFAULT_LENGTH = 512
    trainer_type: Literal["dpo"] = "dpo"
    loss_type: Annotated[
        str | Annotated[tuple[str, ...], Field(min_length=1)],
        BeforeValidator(_check_losses, json_schema_input_type=str | list[str]),
    ] = "sigmoid"
    """The loss of a pair, or a list of losses whose sum is minimized (MPO, arXiv:2411.10442).
    `sigmoid_norm` is `sigmoid` with log-ratios per token. `aot` and `aot_unpaired` (2406.05882)
    compare the sorted log-ratios of a step. `sft` is the cross-entropy of the chosen answers."""
    loss_weights: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] | None = None
    """Weight of each loss of `loss_type`; None: 1 each."""
    label_smoothing: Smoothing | None = None
    """Assumed share of pairs with wrong labels, for sigmoid, sigmoid_norm, robust, exo_pair, aot
    and aot_unpaired. None: 0, and 1e-3 for exo_pair."""
    f_divergence_type: Annotated[str, choice("f_divergence_type", DIVERGENCES)] = "reverse_kl"
    """The divergence from the reference (f-DPO, arXiv:2309.16240). A loss of the difference of two
    log-ratios then reads the derivative of the divergence at the ratios."""
    f_alpha_divergence_coef: Annotated[float, Field(ge=-100, le=100)] = 0.5
    """Alpha of `alpha_divergence`; 1 is `reverse_kl`."""
    ld_alpha: Fraction | None = None
    """Weight of the log-probabilities of tokens beyond the length of the shorter answer of a pair
    (LD-DPO, arXiv:2409.06411): 0 omits these tokens. None: 1."""
    use_weighting: StrictFlag = False
    """Weight each pair with the probability of its answers under the model, per token (WPO,
    arXiv:2406.11827)."""
    discopop_tau: Positive = 0.05
    """Temperature of the mixture in `discopop`."""
    reference_free: StrictFlag = False
    """Compare with a uniform reference; no reference model is read."""
    ref_model_mixup_alpha: Mixup = 0.9
    ref_model_sync_steps: Steps = 64

    @field_validator("label_smoothing")
    @classmethod
    def _is_read(cls, value: float | None, info: ValidationInfo) -> float | None:
        losses = _list_names(info)
        if value and not {*losses} & {*SMOOTHED}:
            raise conflict(
                f"label_smoothing has no effect with loss_type {', '.join(losses)}: omit it, or "
                f"use one of {', '.join(SMOOTHED)}"
            )
        if value == 0 and "exo_pair" in losses:
            raise conflict("exo_pair computes the logarithm of label_smoothing: set it above 0")
        return value

    @field_validator("loss_type")
    @classmethod
    def _compares_a_whole_step(
        cls, value: str | tuple[str, ...], info: ValidationInfo
    ) -> str | tuple[str, ...]:
        losses = (value,) if isinstance(value, str) else value
        if len({*losses}) < len(losses):
            raise conflict(f"{', '.join(losses)}: write each loss once, with its weight")
        transported = [name for name in losses if name in TRANSPORTED]
        if transported and info.data.get("gradient_accumulation_steps") not in (None, 1):
            raise conflict(
                f"{transported[0]} would compare log-ratios only within a microbatch, not in the "
                "whole step: set gradient_accumulation_steps to 1"
            )
        return value

    @field_validator("loss_weights")
    @classmethod
    def _one_each(
        cls, value: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        count = len(_list_names(info))
        if value is not None and len(value) != count:
            raise conflict(f"{len(value)} loss_weights for {count} losses of loss_type")
        return value

    @field_validator("f_divergence_type")
    @classmethod
    def _is_of_differences(cls, value: str, info: ValidationInfo) -> str:
        other_losses = [name for name in _list_names(info) if name not in _OF_DIFFERENCES]
        if value != "reverse_kl" and other_losses:
            raise conflict(
                f"loss_type {other_losses[0]} is no loss of the difference of two scores: use "
                f"reverse_kl, or one of {', '.join(_OF_DIFFERENCES)}"
            )
        return value

    @field_validator("ld_alpha")
    @classmethod
    def _is_of_pairs(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("precompute_ref_log_probs"):
            raise conflict(
                "ld_alpha depends on both answers of a pair, and precompute_ref_log_probs stores "
                "the log-probability of each answer: set one of the two"
            )
        return value

    @field_validator("use_weighting")
    @classmethod
    def _weighs_pairs(cls, value: bool, info: ValidationInfo) -> bool:
        without_pairs = {*_list_names(info)} & {*TRANSPORTED, "sft"}
        if value and without_pairs:
            raise conflict(
                f"loss_type {min(without_pairs)} has no loss of each pair to weight: omit "
                "use_weighting"
            )
        return value

    @field_validator("reference_free")
    @classmethod
    def _nothing_ahead(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("precompute_ref_log_probs"):
            raise conflict("with reference_free there is no reference to compute ahead: keep one")
        if value and info.data.get("sync_ref_model"):
            raise conflict("with reference_free there is no reference that could move: keep one")
        return value

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return not self.reference_free

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        out = super().idle()
        if "discopop" not in self.losses:
            out.append(("discopop_tau", f"loss_type is {', '.join(self.losses)}"))
        name = "f_alpha_divergence_coef"
        if name in self.model_fields_set and self.f_divergence_type != "alpha_divergence":
            reason = f"f_divergence_type is {self.f_divergence_type}"
            out.append((name, reason))
        return out

    @property
    def losses(self) -> dict[str, float]:
        """The weight of each loss, by name."""
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        return dict(zip(names, self.loss_weights or (1.0,) * len(names), strict=True))

    def get_smoothing(self, loss: str) -> float:
        """Return the assumed share of pairs with wrong labels of a loss."""
        if self.label_smoothing is None:
            return 1e-3 if loss == "exo_pair" else 0.0
        return self.label_smoothing


def _list_names(info: ValidationInfo) -> tuple[str, ...]:
    """Return the losses of valid options."""
    losses = info.data.get("loss_type", "sigmoid")
    return (losses,) if isinstance(losses, str) else losses


class ORPOArguments(AnswerArguments):
    """Odds-ratio preference optimization (Hong et al., arXiv:2403.07691): no reference."""

    ALIASES: ClassVar[Mapping[str, str]] = {"lambda_orpo": "beta"}

    trainer_type: Literal["orpo"] = "orpo"
    beta: NotNegative = 0.1
    """Weight of the odds ratio relative to the cross-entropy of the chosen text; lambda in the
    paper."""


class ContrastArguments(AnswerArguments):
    """Options of `cpo` and `simpo`."""

    beta: Positive = 0.1
    """Factor on the log-probabilities before the loss."""
    simpo_gamma: NotNegative = 0.5
    """Target margin, for losses with a margin."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs with wrong labels."""
    alpha: Annotated[float, Field(ge=-100, le=100)] = 0.0
    """Shape of the reward of an answer with the probability p (AlphaPO, arXiv:2501.03884): the
    reward is (1 - p^-`alpha`) / `alpha`. 0: the log-probability."""


class CPOArguments(ContrastArguments):
    """Contrastive preference optimization (Xu et al., arXiv:2401.08417): no reference."""

    trainer_type: Literal["cpo"] = "cpo"
    loss_type: Annotated[str, choice("loss_type", CPO_LOSSES)] = "sigmoid"
    """The loss of a pair; `ipo` and `simpo` use log-probabilities per token."""
    cpo_alpha: NotNegative = 1.0
    """Weight of the cross-entropy of the chosen answer; 0: none."""

    @field_validator("loss_type")
    @classmethod
    def _reads_the_others(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("label_smoothing") and value not in ("sigmoid", "simpo"):
            raise conflict(f"label_smoothing has no effect with loss_type {value!r}: omit it")
        return value

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        if self.loss_type == "simpo":
            return []
        return [("simpo_gamma", f"loss_type {self.loss_type} has no target margin")]


class SimPOArguments(ContrastArguments):
    """Simple preference optimization (Meng et al., arXiv:2405.14734): no reference."""

    ALIASES: ClassVar[Mapping[str, str]] = {"gamma": "simpo_gamma"}

    trainer_type: Literal["simpo"] = "simpo"
    beta: Positive = 2.0
    """Factor on the log-probabilities per token."""


TPO_LOSSES = ("sigmoid", "hinge", "ipo", "tpo-l")


class TPOArguments(AnswerArguments):
    """Triple preference optimization (Saeidi et al., arXiv:2405.16681): a preference, and the
    cross-entropy of a third answer that is known to be right; no reference model."""

    trainer_type: Literal["tpo"] = "tpo"
    beta: Positive = 0.01
    """Factor on the log-probabilities before the loss."""
    loss_type: Annotated[str, choice("loss_type", TPO_LOSSES, {"tpo_l": "tpo-l"})] = "sigmoid"
    """The loss of a pair; `ipo` and `tpo-l` use log-probabilities per token."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs with wrong labels."""
    tpo_alpha: NotNegative = 1.0
    """Weight of the cross-entropy of the answer `reference`; 0: that answer is not read."""
    tpo_l_gamma: NotNegative = 0.5
    """Target margin of `tpo-l`."""

    @field_validator("label_smoothing")
    @classmethod
    def _is_read(cls, value: float, info: ValidationInfo) -> float:
        loss_type = info.data.get("loss_type", "sigmoid")
        if value and loss_type not in ("sigmoid", "tpo-l"):
            raise conflict(f"label_smoothing has no effect with loss_type {loss_type!r}: omit it")
        return value

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        if self.loss_type == "tpo-l":
            return []
        return [("tpo_l_gamma", f"loss_type {self.loss_type} has no target margin")]


KTO_LOSSES = ("kto", "apo_zero_unpaired")


class LabelledArguments(ReferenceArguments):
    """Options of `kto` and `bco`."""

    desirable_weight: NotNegative = 1.0
    """Factor on the loss of good answers."""
    undesirable_weight: NotNegative = 1.0
    """Factor on the loss of bad answers."""


class KTOArguments(LabelledArguments, AnswerArguments):
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306)."""

    trainer_type: Literal["kto"] = "kto"
    loss_type: Annotated[str, choice("loss_type", KTO_LOSSES)] = "kto"
    """The loss; `apo_zero_unpaired` (arXiv:2408.06266) does not estimate the divergence."""


class BCOArguments(LabelledArguments, AnswerArguments):
    """Binary classifier optimization (Jung et al., arXiv:2404.04656)."""

    trainer_type: Literal["bco"] = "bco"


class RewardArguments(NoiseArguments, TrainingArguments):
    """A reward model of pairs (Bradley and Terry): chosen answers receive higher scores.

    The field `margin` of a row may contain the minimum difference of the scores.
    """

    DEFAULT_LENGTH = 1024
    trainer_type: Literal["reward"] = "reward"
    center_rewards_coefficient: NotNegative | None = 0.1
    """Weight of the squared sum of both scores, which keeps their mean near 0; null: none."""


class PRMArguments(NoiseArguments, TrainingArguments):
    """A process reward model (Lightman et al., arXiv:2305.20050): classifies steps as correct or
    not."""

    trainer_type: Literal["prm"] = "prm"
