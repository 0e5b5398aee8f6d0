"""The options that every method has. Imports neither jax nor flax.

Names and defaults are EasyDeL's where it has them. Every option changes what a run does;
`max_length` is the one that only a loader reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.chats import Prompts
from ed_infra.errors import ConfigError
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
from pydantic_core import PydanticCustomError

from ed_trainers.options.optimizers import (
    DECAYING,
    LONGEST,
    OPTIMIZERS,
    SCHEDULERS,
    WITH_MU,
    Flag,
    Share,
    Steps,
    checked_settings,
    conflict,
    problem,
)

#: `[[pattern, value], ...]` over the names of parameters; see `ed_infra.rules`.
Decisions = tuple[tuple[str, Flag], ...]
Factors = tuple[tuple[str, Positive], ...]
Amounts = tuple[tuple[str, NotNegative], ...]


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


#: What `report_to` may name: `ed_trainers.figures.trackers` has a class for each.
TRACKERS = ("wandb", "trackio", "mlflow")


def _names(value: object) -> object:
    """Read one name as a list of it, and `none` as an empty one."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


class TrainingArguments(Options):
    """Options that every method has."""

    ALIASES: ClassVar[dict[str, str]] = {
        "extra_optimizer_kwargs": "optimizer_kwargs",
        "lr_scheduler_kwargs": "scheduler_kwargs",
    }

    learning_rate: Positive = 5e-5
    """Highest learning rate."""
    optimizer: Annotated[str, choice("optimizer", OPTIMIZERS)] = "adamw"
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the optimizer, such as `{b2: 0.95}`."""
    scheduler: Annotated[str, choice("scheduler", SCHEDULERS)] = "none"
    """Course of the learning rate after the warm-up; `none` and `constant` keep it, `wsd` keeps it
    until its decay at the end."""
    scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the scheduler: `power` of `polynomial`; `num_decay_steps` and `decay_type`
    (`linear`, `cosine`, `1-sqrt`) of `wsd`."""
    learning_rate_end: NotNegative | None = None
    """The learning rate that a scheduler decays to; None means zero."""
    warmup_steps: Annotated[int, Field(ge=0, le=LONGEST)] = 0
    """Steps in which the learning rate rises linearly to its highest value."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; norms and biases do not decay."""
    clip_grad: Positive | None = None
    """Largest global norm of the gradient."""
    skip_bad_steps: Flag = False
    """Skip a step whose loss or gradient is not finite, or a spike; the next batch goes on."""
    sigma_factor: Positive | None = 6.0
    """With `skip_bad_steps`: standard deviations above the mean of the steps before that make a
    loss, or the norm of a gradient, a spike; None skips only what is not finite."""
    rolling_interval_length: Annotated[int, Field(ge=4, le=100_000)] = 128
    """With `skip_bad_steps`: steps that a loss is compared with. As many skipped in a row end the
    run."""
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
    """Steps between checkpoints; None saves at the end only. SIGUSR1 saves one at any time."""
    save_total_limit: Steps | None = None
    """Checkpoints that are kept, counted from the newest, beside the best; None keeps all."""
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
    save_best_k: Steps | None = None
    """Checkpoints that are kept because they are the best, beside the newest that
    `save_total_limit` keeps (one, where it is None)."""
    load_best_model_at_end: Flag = False
    """End with the best checkpoint instead of the last: `model` is written from it."""
    metric_for_best_model: str | None = None
    """The figure of an evaluation that says which checkpoint is best; None means the loss."""
    greater_is_better: Flag | None = None
    """Whether more of `metric_for_best_model` is better; None means no for names that end with
    `loss` or `perplexity`, and yes for others."""
    ema_decay: Share | None = None
    """Decay of a running mean of the parameters, which is kept beside them in float32."""
    use_ema: Flag = True
    """With `ema_decay`: evaluate the mean, and end with it as the model; false only keeps it in the
    checkpoints."""
    progress_bar_type: Annotated[str, choice("progress bar", ("rich", "json", "none"))] = "rich"
    """`rich` draws a bar, or prints plain lines where standard output is no terminal; `json` prints
    each metrics row."""
    use_tensorboard: bool = True
    """Write the metrics for TensorBoard too, under `<save_directory>/tensorboard`."""
    report_to: Annotated[
        tuple[Annotated[str, choice("tracker", TRACKERS)], ...], BeforeValidator(_names)
    ] = ()
    """Trackers that get the metrics too: `wandb`, `trackio`, `mlflow`; each is an extra of
    ed-trainers."""
    project: str = "easydel"
    """Project of the run in a tracker; mlflow calls it an experiment."""
    run_name: str | None = None
    """Name of the run in a tracker; None takes the last part of `save_directory`."""
    peak_flops_per_device: Positive | None = None
    """FLOP/s that one device can do, for MFU; None takes the known figure of its kind, and without
    one there is no MFU."""

    generation_interval: Steps | None = None
    """Steps between previews, and one at the end: completions of a few prompts by the present
    weights, in the terminal, the metrics and the report; None shows none."""
    generation_prompts: Prompts = ()
    """Prompts of the previews: texts, and conversations (lists of messages with `role` and
    `content`). Without prompts, previews begin held-out documents."""
    generation_num_prompts: Annotated[int, Field(ge=1, le=64)] = 3
    """How many held-out documents a preview begins, without `generation_prompts`."""
    generation_max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Tokens of a completion in a preview, at most."""
    generation_temperature: NotNegative = 0.0
    """Temperature of the previews; 0 always takes the likeliest token."""
    generation_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability that the previews sample from."""
    benchmark_interval: Steps | None = None
    """Steps between runs of the `benchmarks`, and one at the end; None runs none."""
    benchmarks: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tasks of lm-evaluation-harness; their figures are `benchmark/<task>/<metric>` in the metrics.
    How they are run is said in the section `eval`."""
    profile_start_step: Steps | None = None
    """The first step of a trace by jax's profiler, which is written to `<save_directory>/profile`;
    None traces nothing. A later step than the first one leaves compiling out."""
    profile_steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """How many steps are traced."""

    @property
    def loader_batch_size(self) -> int:
        """Rows of a batch of the loader."""
        return self.total_batch_size

    def idle(self) -> list[tuple[str, str]]:
        """The options of a method that others of them make idle, each with the reason."""
        return []

    # Each validator stands at the later of the two fields that it compares, so that the error
    # carries that field's place in the YAML.

    @field_validator("optimizer_kwargs")
    @classmethod
    def _known_settings(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        optimizer = info.data.get("optimizer")
        if optimizer is None:  # the optimizer itself is wrong: that is reported already
            return value
        return checked_settings(optimizer, value, OPTIMIZERS)

    @field_validator("scheduler_kwargs")
    @classmethod
    def _known_scheduler_settings(
        cls, value: dict[str, Any], info: ValidationInfo
    ) -> dict[str, Any]:
        scheduler = info.data.get("scheduler")
        return value if scheduler is None else checked_settings(scheduler, value, SCHEDULERS)

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
        if value is not None and optimizer not in WITH_MU:
            raise conflict(
                f"tx_mu_dtype has no effect with optimizer {optimizer!r}: "
                f"only {' and '.join(WITH_MU)} take it"
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
                problems.append(problem(index, pattern, str(error)))
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return value

    @field_validator("load_best_model_at_end", "save_best_k")
    @classmethod
    def _checkpoints_are_evaluated(
        cls, value: bool | int | None, info: ValidationInfo
    ) -> bool | int | None:
        save, evaluate = info.data.get("save_steps"), info.data.get("evaluation_steps")
        if value and (save is None or evaluate is None or save % evaluate):
            raise conflict(
                f"{info.field_name} compares checkpoints by their evaluations: save_steps "
                f"({save}) must be a multiple of evaluation_steps ({evaluate})"
            )
        return value

    @field_validator("metric_for_best_model", "greater_is_better")
    @classmethod
    def _something_is_best(cls, value: str | bool | None, info: ValidationInfo) -> Any:
        best = info.data.get("save_best_k"), info.data.get("load_best_model_at_end")
        if value is not None and not any(best):
            raise conflict(
                f"{info.field_name} has no effect without save_best_k or load_best_model_at_end"
            )
        return value

    @field_validator("use_ema")
    @classmethod
    def _there_is_a_mean(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("ema_decay") is None:
            raise conflict("use_ema: false has no effect without ema_decay")
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
