"""What a training run is told: one class of options for each method. Imports neither jax nor flax.

Names and defaults are EasyDeL's where it has them. Every option changes what a run does;
`max_length` is the one that only a loader reads.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.errors import unknown_name
from ed_infra.options import Options, choice, dtype_name
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

#: Optimizers, with the settings that `optimizer_kwargs` may give and their defaults.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "nesterov": False},
    "lion": {"b1": 0.9, "b2": 0.99},
    "adafactor": {
        "decay_rate": 0.8,
        "clipping_threshold": 1.0,
        "min_dim_size_to_factor": 128,
        "multiply_by_parameter_scale": True,
    },
    "rmsprop": {"decay": 0.9, "eps": 1e-8, "momentum": None},
    "sgd": {"momentum": None, "nesterov": False},
}

SCHEDULERS = ("none", "constant", "linear", "cosine")

# The optimizers that keep a first moment whose dtype can be chosen.
_WITH_MU = ("adamw", "lion")
_DECAYING = ("linear", "cosine")

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


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class TrainingArguments(Options):
    """Options that every method has."""

    ALIASES: ClassVar[dict[str, str]] = {"extra_optimizer_kwargs": "optimizer_kwargs"}

    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """Highest learning rate."""
    optimizer: Annotated[str, choice("optimizer", OPTIMIZERS)] = "adamw"
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the optimizer, such as `{b2: 0.95}`."""
    scheduler: Annotated[str, choice("scheduler", SCHEDULERS)] = "none"
    """Course of the learning rate after the warm-up; `none` and `constant` keep it."""
    learning_rate_end: Annotated[float, Field(ge=0)] | None = None
    """What `linear` and `cosine` decay to; None means zero."""
    warmup_steps: NotNegative = 0
    """Steps in which the learning rate rises linearly to its highest value."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay; norms and biases do not decay."""
    clip_grad: Annotated[float, Field(gt=0)] | None = None
    """Largest global norm of the gradient."""
    tx_mu_dtype: Annotated[str | None, dtype_name] = None
    """Dtype in which adamw and lion store their first moment; None means the parameter's."""
    master_dtype: Annotated[Literal["float32"] | None, dtype_name] = "float32"
    """Dtype of the copy that the optimizer updates where parameters are stored below float32;
    None updates the stored parameters themselves."""

    num_train_epochs: Positive = 10
    """Passes over the data; read when `max_training_steps` is not given."""
    max_training_steps: Positive | None = None
    """Optimizer steps of the whole run, before and after any resume."""
    training_time_limit: Annotated[
        Annotated[float, Field(gt=0)] | None, BeforeValidator(_duration)
    ] = None
    """Seconds after which training stops as it would on Ctrl-C: `5400`, `"90min"`, `"1h30m"`."""
    total_batch_size: Positive = 32
    """Sequences of one optimizer step, over all hosts and all microbatches."""
    gradient_accumulation_steps: Positive = 1
    """Microbatches that an optimizer step is divided into; the result does not depend on it."""
    eval_batch_size: Positive | None = None
    """Sequences that are evaluated at once; None means as the loader gives them."""
    max_length: Positive | None = None
    """Length of a sequence, for whoever builds the loader from these arguments."""
    seed: NotNegative = 42
    """Seed of everything that is random in training, other than the order of the data."""

    save_directory: str = "EasyDeL-Checkpoints"
    """Where checkpoints, metrics and the trained model go."""
    save_steps: Positive | None = None
    """Steps between checkpoints; None saves at the end only."""
    save_total_limit: Positive | None = None
    """Checkpoints that are kept, counted from the newest; None keeps all."""
    do_last_save: bool = True
    """Save a checkpoint and the model, in Hugging Face layout, when training ends."""
    resume_if_possible: bool = True
    """Go on from the newest checkpoint in `save_directory`; False moves what is there aside."""

    log_steps: Positive = 10
    """Steps between rows of the metrics; the first and the last step always have one."""
    report_steps: Positive = 5
    """Steps between updates of the progress bar's figures."""
    evaluation_steps: Positive | None = None
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
        optimizer = info.data.get("optimizer", "")
        for name in value:
            if name not in OPTIMIZERS.get(optimizer, value):
                problem = unknown_name(f"setting of {optimizer}", name, OPTIMIZERS[optimizer])
                raise _conflict(str(problem))
        return value

    @field_validator("learning_rate_end")
    @classmethod
    def _decays(cls, value: float | None, info: ValidationInfo) -> float | None:
        scheduler = info.data.get("scheduler", "linear")
        if value is not None and scheduler not in _DECAYING:
            raise _conflict(
                f"learning_rate_end has no effect with scheduler {scheduler!r}: "
                f"leave it out, or take one of {', '.join(_DECAYING)}"
            )
        return value

    @field_validator("tx_mu_dtype")
    @classmethod
    def _has_moment(cls, value: str | None, info: ValidationInfo) -> str | None:
        optimizer = info.data.get("optimizer", "adamw")
        if value is not None and optimizer not in _WITH_MU:
            raise _conflict(
                f"tx_mu_dtype has no effect with optimizer {optimizer!r}: "
                f"only {' and '.join(_WITH_MU)} take it"
            )
        return value

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        total = info.data.get("total_batch_size", value)
        if total % value:
            raise _conflict(
                f"total_batch_size {total} does not divide into {value} microbatches: "
                "total_batch_size is the number of sequences of a whole optimizer step"
            )
        return value


class SFTArguments(TrainingArguments):
    """Supervised fine-tuning, and pre-training: the cross-entropy of the labels."""

    trainer_type: Literal["sft"] = "sft"
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    lmhead_chunksize: Positive | None = None
    """Tokens whose logits exist at once; None lets the loss choose."""


def _conflict(message: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{message}", {"message": message})


#: Method name -> its options.
ARGUMENTS: dict[str, type[TrainingArguments]] = {"sft": SFTArguments}


def arguments_class(trainer_type: str) -> type[TrainingArguments]:
    """Return the options of a method.

    Raises:
        ConfigError: the method is not known.
    """
    try:
        return ARGUMENTS[trainer_type]
    except KeyError:
        raise unknown_name("trainer_type", trainer_type, ARGUMENTS) from None
