"""The options that every method has. Imports neither jax nor flax.

Names and defaults are EasyDeL's where it has them. Every option changes what a run does;
`max_length` is the one that only a loader reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.options import (
    Count,
    NotNegative,
    Options,
    Positive,
    Seed,
    choice,
    dtype_name,
)
from ed_infra.rules import Rules
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

# The share of a running mean that stays.
Share = Annotated[float, Field(ge=0, lt=1)]
Flag = Annotated[bool, Field(strict=True)]
# No run is longer: a larger number is a slip of the hand.
_LONGEST = 100_000_000
Steps = Annotated[int, Field(gt=0, le=_LONGEST)]
#: `[[pattern, value], ...]` over the names of parameters; see `ed_infra.rules`.
Decisions = tuple[tuple[str, Flag], ...]
Factors = tuple[tuple[str, Positive], ...]
Amounts = tuple[tuple[str, NotNegative], ...]


class AdamWSettings(Options):
    """What `optimizer_kwargs` may set for adamw."""

    b1: Share = 0.9
    b2: Share = 0.999
    eps: Positive = 1e-8
    nesterov: Flag = False


class LionSettings(Options):
    """What `optimizer_kwargs` may set for lion."""

    b1: Share = 0.9
    b2: Share = 0.99


class AdafactorSettings(Options):
    """What `optimizer_kwargs` may set for adafactor."""

    decay_rate: Annotated[float, Field(gt=0, le=1)] = 0.8
    clipping_threshold: Positive | None = 1.0
    min_dim_size_to_factor: Count = 128
    multiply_by_parameter_scale: Flag = True


class RmspropSettings(Options):
    """What `optimizer_kwargs` may set for rmsprop."""

    decay: Share = 0.9
    eps: Positive = 1e-8
    momentum: Share | None = None


class SgdSettings(Options):
    """What `optimizer_kwargs` may set for sgd."""

    momentum: Share | None = None
    nesterov: Flag = False


#: Optimizers, with the settings that `optimizer_kwargs` may give: names, kinds, bounds, defaults.
OPTIMIZERS: dict[str, type[Options]] = {
    "adamw": AdamWSettings,
    "lion": LionSettings,
    "adafactor": AdafactorSettings,
    "rmsprop": RmspropSettings,
    "sgd": SgdSettings,
}

SCHEDULERS = ("none", "constant", "linear", "cosine")
DECAYING = ("linear", "cosine")

# The optimizers that keep a first moment whose dtype can be chosen.
_WITH_MU = ("adamw", "lion")

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "sec": 1.0}


def _duration(value: object) -> object:
    """Read `90`, `"90s"`, `"50min"`, `"1h30m"`: a duration in seconds."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)(min|sec|d|h|m|s)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise PydanticCustomError(
            "duration",
            "{value} is not a duration: give seconds, or text such as '90s', '50min' or '1h30m'",
            {"value": repr(value)},
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


class TrainingArguments(Options):
    """Options that every method has."""

    ALIASES: ClassVar[dict[str, str]] = {"extra_optimizer_kwargs": "optimizer_kwargs"}

    learning_rate: Positive = 5e-5
    """Highest learning rate."""
    optimizer: Annotated[str, choice("optimizer", OPTIMIZERS)] = "adamw"
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the optimizer, such as `{b2: 0.95}`."""
    scheduler: Annotated[str, choice("scheduler", SCHEDULERS)] = "none"
    """Course of the learning rate after the warm-up; `none` and `constant` keep it."""
    learning_rate_end: NotNegative | None = None
    """The learning rate that `linear` and `cosine` decay to; None means zero."""
    warmup_steps: Annotated[int, Field(ge=0, le=_LONGEST)] = 0
    """Steps in which the learning rate rises linearly to its highest value."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; norms and biases do not decay."""
    clip_grad: Positive | None = None
    """Largest global norm of the gradient."""
    tx_mu_dtype: Annotated[str | None, dtype_name] = None
    """Dtype in which adamw and lion store their first moment; None means the parameter's."""
    master_dtype: Annotated[Literal["float32"] | None, dtype_name] = "float32"
    """Dtype of the copy that the optimizer updates where parameters are stored below float32;
    None updates the stored parameters themselves."""

    trainable_rules: Decisions = ()
    """Pairs `[pattern, true or false]` over the names of parameters: the first that matches says
    whether a parameter learns, and one that none matches does not. Without rules all learn."""
    learning_rate_rules: Factors = ()
    """Pairs `[pattern, factor]`: the learning rate of the parameters that match is multiplied."""
    weight_decay_rules: Amounts = ()
    """Pairs `[pattern, decay]`: the weight decay of the parameters that match, norms and biases
    too, in place of `weight_decay`."""

    num_train_epochs: Steps = 10
    """Passes over the data, where `max_training_steps` does not set the length."""
    max_training_steps: Steps | None = None
    """Optimizer steps of the whole run, before and after any resume."""
    training_time_limit: Annotated[Positive | None, BeforeValidator(_duration)] = None
    """Seconds after which training stops as it would on Ctrl-C: `5400`, `"90min"`, `"1h30m"`."""
    total_batch_size: Count = 32
    """Sequences of one optimizer step, over all hosts and all microbatches."""
    gradient_accumulation_steps: Count = 1
    """Microbatches that an optimizer step is divided into; the result does not depend on it."""
    eval_batch_size: Count | None = None
    """Sequences that are evaluated at once; None means as the loader gives them."""
    max_length: Count | None = None
    """Length of a sequence, for whoever builds the loader from these arguments."""
    seed: Seed = 42
    """Seed of everything that is random in training, other than the order of the data."""

    save_directory: str = "EasyDeL-Checkpoints"
    """Where checkpoints, metrics and the trained model go."""
    save_steps: Steps | None = None
    """Steps between checkpoints; None saves at the end only."""
    save_total_limit: Steps | None = None
    """Checkpoints that are kept, counted from the newest; None keeps all."""
    do_last_save: bool = True
    """Save a checkpoint and the model, in Hugging Face layout, when training ends."""
    merge_adapters: Flag | None = None
    """Whether the model that is saved at the end has its adapters merged into its weights. None:
    where these are not quantized. True dequantizes them for it; False leaves the adapters alone."""
    resume_if_possible: bool = True
    """Go on from the newest checkpoint in `save_directory`; False moves what is there aside."""

    log_steps: Steps = 10
    """Steps between rows of the metrics; the first and the last step always have one."""
    report_steps: Steps = 5
    """Steps between updates of the progress bar's figures."""
    evaluation_steps: Steps | None = None
    """Steps between evaluations; None evaluates at the end only."""
    progress_bar_type: Annotated[str, choice("progress bar", ("rich", "json", "none"))] = "rich"
    """`rich` draws a bar where standard output is a terminal, `json` prints each metrics row."""
    use_tensorboard: bool = True
    """Write the metrics for TensorBoard too, under `<save_directory>/tensorboard`."""

    # Each validator stands at the later of the two fields that it compares, so that the error
    # carries that field's place in the YAML.

    @field_validator("optimizer_kwargs")
    @classmethod
    def _known_settings(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        optimizer = info.data.get("optimizer")
        if optimizer is None:  # the optimizer itself is wrong: that is reported already
            return value
        settings = OPTIMIZERS[optimizer]
        unknown = [
            _problem(
                name,
                setting,
                f"unknown setting of {optimizer} {name!r}"
                f"{did_you_mean(name, settings.model_fields)} "
                f"(known: {', '.join(settings.model_fields)})",
            )
            for name, setting in value.items()
            if name not in settings.model_fields
        ]
        if unknown:
            raise ValidationError.from_exception_data(settings.__name__, unknown)
        checked = settings(**value)  # its errors keep the place of their key
        return {name: getattr(checked, name) for name in value}

    @field_validator("learning_rate_end")
    @classmethod
    def _decays(cls, value: float | None, info: ValidationInfo) -> float | None:
        scheduler = info.data.get("scheduler", "linear")
        if value is not None and scheduler not in DECAYING:
            raise conflict(
                f"learning_rate_end has no effect with scheduler {scheduler!r}: "
                f"leave it out, or take one of {', '.join(DECAYING)}"
            )
        return value

    @field_validator("tx_mu_dtype")
    @classmethod
    def _has_moment(cls, value: str | None, info: ValidationInfo) -> str | None:
        optimizer = info.data.get("optimizer", "adamw")
        if value is not None and optimizer not in _WITH_MU:
            raise conflict(
                f"tx_mu_dtype has no effect with optimizer {optimizer!r}: "
                f"only {' and '.join(_WITH_MU)} take it"
            )
        return value

    @field_validator("trainable_rules", "learning_rate_rules", "weight_decay_rules")
    @classmethod
    def _are_patterns(
        cls, value: tuple[tuple[str, object], ...], info: ValidationInfo
    ) -> tuple[tuple[str, object], ...]:
        problems = []
        for index, (pattern, _) in enumerate(value):
            try:
                Rules([(pattern, None)], kind=f"{info.field_name} pattern")
            except ConfigError as error:
                problems.append(_problem(index, pattern, str(error)))
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return value

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        total = info.data.get("total_batch_size", value)
        if total % value:
            raise conflict(
                f"total_batch_size {total} does not divide into {value} microbatches: "
                "total_batch_size is the number of sequences of a whole optimizer step"
            )
        return value

    @field_validator("save_directory")
    @classmethod
    def _can_be_a_directory(cls, value: str) -> str:
        if not value.strip():
            raise conflict("save_directory is empty: name a directory, '.' for the present one")
        for path in (Path(value), *Path(value).parents):
            if path.is_file():
                raise conflict(f"{path} is a file: save_directory must name a directory")
        return value


def conflict(message: str) -> PydanticCustomError:
    """The error of a validator, for a value that contradicts another or the world."""
    return PydanticCustomError("conflict", "{message}", {"message": message})


def _problem(key: str | int, value: object, message: str) -> InitErrorDetails:
    """A problem at a key below the field that is being checked."""
    return InitErrorDetails(type=conflict(message), loc=(key,), input=value)
