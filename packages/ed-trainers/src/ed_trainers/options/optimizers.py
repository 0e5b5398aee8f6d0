"""Kinds of values, and the optimizers and schedulers by name, with the settings of each. Imports
neither jax nor flax."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.options import Count, NotNegative, Options, Positive, choice
from ed_infra.rules import Rules
from ed_infra.specs import KEPT_CODES, QUANTIZATION_FORMATS
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

# The share of a running mean that stays.
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
StrictFlag = Annotated[bool, Field(strict=True)]
# No run is longer: a larger number is a slip of the hand.
LONGEST = 100_000_000
Steps = Annotated[int, Field(gt=0, le=LONGEST)]


@dataclass(frozen=True)
class RowKind:
    """The kind of the rows of a method, for the program that builds the loader.

    Attributes:
        name: name of a schema of `ed_data.schema`.
        settings: arguments of the function `<name>_schema` of that module, which returns the
            schema; empty for a schema without arguments.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)


def conflict(message: str) -> PydanticCustomError:
    """Return the error of a value that contradicts another value or the environment."""
    return PydanticCustomError("conflict", "{message}", {"message": message})


def problem(key: str | int, value: object, message: str) -> InitErrorDetails:
    """Return a problem at a key below the validated field."""
    return InitErrorDetails(type=conflict(message), loc=(key,), input=value)


def _check_pattern(value: str, info: ValidationInfo) -> str:
    try:
        Rules([(value, None)], kind=f"{info.field_name} pattern")
    except ConfigError as error:
        raise conflict(str(error)) from None
    return value


def _check_patterns(
    value: tuple[tuple[str, object], ...], info: ValidationInfo
) -> tuple[tuple[str, object], ...]:
    problems = []
    for index, (pattern, _) in enumerate(value):
        try:
            Rules([(pattern, None)], kind=f"{info.field_name} pattern")
        except ConfigError as error:
            problems.append(problem(index, pattern, str(error)))
    if problems:
        raise ValidationError.from_exception_data(str(info.field_name), problems)
    return value


#: First part of the metrics of single parameters: norms of gradients, and statistics of weights.
GRAD_NORMS, WEIGHTS = "grad_norm", "weights"
#: A regular expression over the names of parameters; see `ed_infra.rules`.
NamePattern = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_check_pattern)]
#: `[[pattern, value], ...]` over the names of parameters.
Decisions = Annotated[tuple[tuple[str, StrictFlag], ...], AfterValidator(_check_patterns)]
Factors = Annotated[tuple[tuple[str, Positive], ...], AfterValidator(_check_patterns)]
Amounts = Annotated[tuple[tuple[str, NotNegative], ...], AfterValidator(_check_patterns)]

#: When something periodic happens; `no` in YAML is false.
Strategy = Annotated[
    Literal["no", "steps", "epoch"],
    BeforeValidator(lambda value: "no" if value is False else value),
]

#: Names allowed in `report_to`; `ed_trainers.figures.trackers` has a class for each.
_TRACKERS = ("wandb", "trackio", "mlflow")


def _names(value: object) -> object:
    """Convert one name to a tuple, and `none` to an empty tuple."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


TrackerNames = Annotated[
    tuple[Annotated[str, choice("tracker", _TRACKERS)], ...], BeforeValidator(_names)
]
#: A penalty that is subtracted from logits.
LogitPenalty = Annotated[float, Field(ge=-2, le=2)]

_NVIDIA = "Nvidia's formats with scales of 8 bits have no counterpart: use {}"


def _has_format(value: object) -> object:
    others = {"nvfp4": "mxfp4", "nvfp8": "mxfp8"}
    if value in others:
        raise conflict(_NVIDIA.format(others[str(value)]))
    return value


#: A format for quantization-aware training; `affine` needs the number of bits.
QuantizationMode = Annotated[
    str,
    choice(
        "quantization_mode", ("affine", *(n for n in QUANTIZATION_FORMATS if n not in KEPT_CODES))
    ),
    BeforeValidator(_has_format),
]


def check_format_option(name: str, value: int | None, mode: str | None) -> int | None:
    """Return `quantization_bits` or `quantization_group_size`, if the mode has this value."""
    if value is None:
        return value
    if mode is None:
        raise conflict(f"{name} has no effect without quantization_mode")
    if name == "quantization_bits":
        known = (4, 8) if mode == "affine" else (QUANTIZATION_FORMATS[mode][0],)
        if value not in known:
            numbers = " or ".join(map(str, known))
            raise conflict(f"{mode} has {numbers} bits, not {value}: change {name}, or omit it")
    elif value != 32 and mode.startswith("mx"):
        raise conflict(f"{mode} has groups of 32, no others: omit {name}")
    return value


_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "sec": 1.0}


def _duration(value: object) -> object:
    """Read a duration in seconds: `90`, `"90s"`, `"50min"`, `"1h30m"`."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)(min|sec|d|h|m|s)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise PydanticCustomError(
            "duration",
            "{value} is not a duration: use seconds, or text such as '90s', '50min' or '1h30m'",
            {"value": repr(value)},
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


#: Seconds, or a text with units.
Duration = Annotated[Positive, BeforeValidator(_duration)]


def _check_directory(value: str, info: ValidationInfo) -> str:
    name = info.field_name
    if not value.strip():
        raise conflict(f"{name} is empty: name a directory, '.' for the present one")
    if "://" in value:
        raise conflict(
            f"{name} {value!r} is an address, and checkpoints are written to a local directory: "
            "name a directory, and set mirror_address to the address, to which complete "
            "checkpoints are copied"
        )
    for path in (Path(value), *Path(value).parents):
        try:
            is_file = path.is_file()
        except OSError as error:  # for example, a name that is too long
            raise conflict(
                f"{name} {value[:200]!r} cannot be a directory ({error.strerror}): use a shorter "
                "name, or another folder"
            ) from None
        if is_file:
            raise conflict(f"{path} is a file: {name} must name a directory")
    return value


#: The path of a directory of this machine, which need not exist.
LocalDirectory = Annotated[str, AfterValidator(_check_directory)]


class CautiousSettings(Options):
    """Settings of the optimizers with a cautious variant (Liang et al., arXiv:2411.16085)."""

    cautious: StrictFlag = False
    """Do not change the values whose update has the opposite sign of the gradient. The other
    updates of the array grow by the inverse of their share."""


class AdamWSettings(CautiousSettings):
    """Settings of adamw in `optimizer_kwargs`."""

    b1: FractionBelowOne = 0.9
    b2: FractionBelowOne = 0.999
    eps: Positive = 1e-8
    nesterov: StrictFlag = False


class AdamW8bitSettings(AdamWSettings):
    """Settings of adamw_8bit in `optimizer_kwargs`."""

    block_size: Count = 256
    """Number of consecutive values of a row of a parameter that share a scale."""


class LionSettings(CautiousSettings):
    """Settings of lion in `optimizer_kwargs`."""

    b1: FractionBelowOne = 0.9
    b2: FractionBelowOne = 0.99


class Lion8bitSettings(LionSettings):
    """Settings of lion_8bit in `optimizer_kwargs`."""

    block_size: Count = 256
    """Number of consecutive values of a row of a parameter that share a scale."""


class AdafactorSettings(Options):
    """Settings of adafactor in `optimizer_kwargs`."""

    decay_rate: Annotated[float, Field(gt=0, le=1)] = 0.8
    clipping_threshold: Positive | None = 1.0
    min_dim_size_to_factor: Count = 128
    multiply_by_parameter_scale: StrictFlag = True


class RmspropSettings(Options):
    """Settings of rmsprop in `optimizer_kwargs`."""

    decay: FractionBelowOne = 0.9
    eps: Positive = 1e-8
    momentum: FractionBelowOne | None = None


class SgdSettings(Options):
    """Settings of sgd in `optimizer_kwargs`."""

    momentum: FractionBelowOne | None = None
    nesterov: StrictFlag = False


class AdoptSettings(CautiousSettings):
    """Settings of adopt in `optimizer_kwargs`."""

    b1: FractionBelowOne = 0.9
    b2: FractionBelowOne = 0.9999
    eps: Positive = 1e-6
    """Smallest divisor of a gradient."""
    use_clipping: StrictFlag = True
    """Limit the size of each normalized gradient to the fourth root of the number of updates."""


class AdEMAMixSettings(CautiousSettings):
    """Settings of ademamix in `optimizer_kwargs`."""

    b1: FractionBelowOne = 0.9
    b2: FractionBelowOne = 0.999
    b3: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Decay of the slow mean of the gradients."""
    alpha: NotNegative = 5.0
    """Weight of the slow mean."""
    eps: Positive = 1e-8
    alpha_warmup: Steps | None = None
    """Number of steps in which `alpha` grows from 0; None: none. The paper uses the whole run."""
    b3_warmup: Steps | None = None
    """Number of steps in which the half-life of the slow mean grows from that of `b1`; None:
    none. The paper uses the whole run."""


class SoapSettings(CautiousSettings):
    """Settings of soap in `optimizer_kwargs`."""

    b1: FractionBelowOne = 0.95
    b2: FractionBelowOne = 0.95
    shampoo_beta: FractionBelowOne | None = None
    """Decay of the matrices whose eigenvectors are the bases; None: `b2`."""
    eps: Positive = 1e-8
    precondition_frequency: Count = 10
    """Number of updates between two changes of the bases."""
    max_precond_dim: Count = 10_000
    """Longest axis with a basis."""
    precondition_1d: StrictFlag = False
    """Vectors have a basis too."""
    normalize_grads: StrictFlag = False
    """Divide the direction of each array by its root mean square."""
    correct_bias: StrictFlag = True
    """Correct the moments for their start at 0, as in Adam."""


class MuonSettings(CautiousSettings):
    """Settings of muon in `optimizer_kwargs`; `adam_...` apply to all but matrices of layers."""

    momentum: FractionBelowOne = 0.95
    nesterov: StrictFlag = True
    ns_steps: Annotated[int, Field(gt=0, le=100)] = 5
    eps: Positive = 1e-7
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """`original`: times the root of max(1, out / in); `match_rms_adamw`: times 0.2 and the root of
    max(in, out), so that learning rates of AdamW fit."""
    adam_b1: FractionBelowOne = 0.9
    adam_b2: FractionBelowOne = 0.999
    adam_eps: Positive = 1e-8
    adam_learning_rate: Positive | None = None
    """Highest learning rate of the parameters that AdamW trains; None: `learning_rate`."""


class Muon8bitSettings(MuonSettings):
    """Settings of muon_8bit in `optimizer_kwargs`."""

    block_size: Count = 256
    """Number of consecutive values of a row of a parameter that share a scale."""


class DionSettings(Options):
    """Settings of dion in `optimizer_kwargs`; `adam_...` apply to all but matrices of layers."""

    mu: FractionBelowOne = 0.95
    """Share of the approximated part that stays in the momentum."""
    rank_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Rank of an update, relative to the shorter side of the matrix."""
    eps: Positive = 1e-8
    """Added to the lengths of the columns of the right factor."""
    adam_b1: FractionBelowOne = 0.9
    adam_b2: FractionBelowOne = 0.999
    adam_eps: Positive = 1e-8
    adam_learning_rate: Positive | None = None
    """Highest learning rate of the parameters that AdamW trains; None: `learning_rate`."""


class MarsSettings(CautiousSettings):
    """Settings of mars in `optimizer_kwargs`; `adam_...` apply to arrays that are not matrices."""

    b1: FractionBelowOne = 0.95
    b2: FractionBelowOne = 0.99
    eps: Positive = 1e-8
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.025
    """Strength of the variance reduction; 0 is AdamW with clipping."""
    max_grad_norm: Positive = 1.0
    """Largest norm of each parameter's corrected gradient."""
    adam_b1: FractionBelowOne = 0.9
    adam_b2: FractionBelowOne = 0.95
    adam_eps: Positive = 1e-8


class KronSettings(Options):
    """Settings of quad and skew in `optimizer_kwargs`."""

    EQUIVALENT: ClassVar[Mapping[str, str]] = {
        "scanned_layers": "omit it: the arrays of single layers are found",
        "pipeline_axis_name": "omit it: the mesh places the state",
        "pipeline_axis_size": "omit it: the mesh places the state",
        "params_partition_specs": "omit it: the mesh places the state",
        "weight_decay": "trainer.weight_decay",
        "weight_decay_mask": "trainer.weight_decay_rules",
    }

    lr_style: Literal["adam"] | None = "adam"
    """`adam`: divide the update by 5, so that learning rates of Adam fit; None: the root of the
    mean square of an update is about 1."""
    b1: FractionBelowOne = 0.95
    """Decay of the momentum that is preconditioned."""
    normalize_grads: StrictFlag = False
    """Divide the momentum of each array by its norm."""
    max_size_dense: Count = 16384
    """Longest axis of a matrix with dense factors; longer axes have diagonal factors."""
    block_size: Count = 256
    """Rows and columns of the blocks of a matrix. Each block has two factors."""
    preconditioner_lr: Positive = 0.7
    """Learning rate of the factors; it decays slowly to 0.4."""
    preconditioner_init_scale: Positive = 1.0
    """First factors: this multiple of the identity."""
    noise_scale: NotNegative = 1e-9
    """Standard deviation of the noise on the gradients that the factors see."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored momentum and factors."""


class QuadSettings(KronSettings):
    """Settings of quad in `optimizer_kwargs`."""


class SkewSettings(KronSettings):
    """Settings of skew in `optimizer_kwargs`."""


class ScheduleFreeAdamWSettings(Options):
    """Settings of schedule_free_adamw in `optimizer_kwargs`."""

    b1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    b2: FractionBelowOne = 0.999
    eps: Positive = 1e-8
    weight_lr_power: Annotated[float, Field(ge=0, le=10)] = 2.0
    """Power of the learning rate that weighs an iterate in the average."""


class DecaySettings(Options):
    """Settings of linear and cosine in `scheduler_kwargs`."""

    decay_steps: Steps | None = None
    """Step at which the decay ends; later steps keep the last learning rate. None: the end of the
    run."""


class PolynomialSettings(DecaySettings):
    """Settings of polynomial in `scheduler_kwargs`."""

    power: Positive = 1.0


class WSDSettings(Options):
    """Settings of wsd (warm-up, stable, decay) in `scheduler_kwargs`."""

    num_decay_steps: Steps | None = None
    """Number of decay steps at the end of the run; None: a tenth of the run."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"


class NoSettings(Options):
    """A scheduler without settings."""


#: Optimizers, with the settings in `optimizer_kwargs`: names, kinds, bounds, defaults.
OPTIMIZERS: dict[str, type[Options]] = {
    "adamw": AdamWSettings,
    "adamw_8bit": AdamW8bitSettings,
    "lion": LionSettings,
    "lion_8bit": Lion8bitSettings,
    "adafactor": AdafactorSettings,
    "muon": MuonSettings,
    "muon_8bit": Muon8bitSettings,
    "rmsprop": RmspropSettings,
    "sgd": SgdSettings,
    "mars": MarsSettings,
    "quad": QuadSettings,
    "skew": SkewSettings,
    "schedule_free_adamw": ScheduleFreeAdamWSettings,
    "soap": SoapSettings,
    "adopt": AdoptSettings,
    "ademamix": AdEMAMixSettings,
    "dion": DionSettings,
}

#: Schedulers of the learning rate, with the settings in `scheduler_kwargs`.
SCHEDULERS: dict[str, type[Options]] = {
    "none": NoSettings,
    "constant": NoSettings,
    "linear": DecaySettings,
    "cosine": DecaySettings,
    "polynomial": PolynomialSettings,
    "wsd": WSDSettings,
}
DECAYING = ("linear", "cosine", "polynomial", "wsd")


class EasyDeLOptimizers(StrEnum):
    """EasyDeL's names of optimizers, and the further keys of `OPTIMIZERS`."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    LION = "lion"
    LION_8BIT = "lion_8bit"
    ADAFACTOR = "adafactor"
    MUON = "muon"
    MUON_8BIT = "muon_8bit"
    RMSPROP = "rmsprop"
    SGD = "sgd"
    MARS = "mars"
    QUAD = "quad"
    SKEW = "skew"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SOAP = "soap"
    ADOPT = "adopt"
    ADEMAMIX = "ademamix"
    DION = "dion"


class EasyDeLSchedulers(StrEnum):
    """EasyDeL's names of schedulers, and the further keys of `SCHEDULERS`."""

    NONE = "none"
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    POLYNOMIAL = "polynomial"
    WSD = "wsd"


#: The optimizers whose update has the same size for each scale of the gradient, array by array. The
#: table of µP for Adam applies to them.
WITH_WIDTHS = ("adamw", "adamw_8bit", "lion", "lion_8bit", "adopt", "ademamix")
#: The optimizers that keep a first moment whose dtype can be chosen.
WITH_MU = ("adamw", "lion")


def get_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of an array as a matrix: the split of its axes nearest to a square."""
    cuts = range(1, len(shape))
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in cuts]
    if not splits:
        return math.prod(shape), 1
    return min(splits, key=lambda sizes: max(sizes) / min(sizes))


def optimizer_settings(optimizer: str, settings: Mapping[str, Any]) -> Options:
    """Return the settings of an optimizer, defaults filled in."""
    return OPTIMIZERS[optimizer](**settings)


def scheduler_settings(scheduler: str, settings: Mapping[str, Any]) -> Options:
    """Return the settings of a scheduler, defaults filled in."""
    return SCHEDULERS[scheduler](**settings)


def checked_settings(
    name: str, settings: dict[str, Any], classes: Mapping[str, type[Options]]
) -> dict[str, Any]:
    """Return the given settings of `name`, validated and converted by its class.

    Raises:
        ValidationError: a setting is unknown or of the wrong kind, at its key.
    """
    cls = classes[name]
    known_names = ", ".join(cls.model_fields) or "none"
    unknown = [
        problem(
            key,
            value,
            f"unknown setting of {name} {key!r}{did_you_mean(key, cls.model_fields)} "
            f"(known: {known_names})",
        )
        for key, value in settings.items()
        if key not in cls.model_fields
    ]
    if unknown:
        raise ValidationError.from_exception_data(cls.__name__, unknown)
    checked = cls(**settings)  # errors keep the position of their key
    return {key: getattr(checked, key) for key in settings}
