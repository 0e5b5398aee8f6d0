"""The options of every method. Imports neither jax nor flax.

Names and defaults are EasyDeL's if EasyDeL has the option. Every option changes a run, except
`max_length`, which only a loader reads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from ed_infra.chats import CheckedPrompts
from ed_infra.easydel_keys import is_data_key, texts_of_section
from ed_infra.options import (
    Count,
    Fraction,
    NotNegative,
    Options,
    Positive,
    Seed,
    Whole,
    choice,
    dtype_name,
)
from ed_infra.specs import EasyDeLQuantizationConfig
from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ed_trainers.options.cadences import (
    BestCount,
    BestFlag,
    Interval,
    StepPhase,
    TaskStrategy,
    TimesPerEpoch,
)
from ed_trainers.options.optimizers import (
    DECAYING,
    LONGEST,
    OPTIMIZERS,
    SCHEDULERS,
    WITH_MU,
    Amounts,
    Decisions,
    Duration,
    Factors,
    FractionBelowOne,
    LocalDirectory,
    LogitPenalty,
    NamePattern,
    QuantizationMode,
    RowKind,
    Steps,
    Strategy,
    StrictFlag,
    TrackerNames,
    check_format_option,
    checked_settings,
    conflict,
    problem,
)
from ed_trainers.options.other_names import EQUIVALENT, SAME

#: Weight of the learner in a mixture.
Mixup = Annotated[float, Field(gt=0, le=1)]


class TrainingArguments(Options):
    """The options of every method."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "extra_optimizer_kwargs": "optimizer_kwargs",
        "lr_scheduler_kwargs": "scheduler_kwargs",
        "per_epoch_evaluation_steps": "max_evaluation_steps",
        "quantization_block": "quantization_group_size",
        **SAME,
    }
    EQUIVALENT: ClassVar[Mapping[str, str]] = {**EQUIVALENT, **texts_of_section("trainer")}

    #: Tokens of a sequence for run files that set no length.
    DEFAULT_LENGTH: ClassVar[int] = 4096

    learning_rate: Positive = 5e-5
    """Highest learning rate."""
    optimizer: Annotated[str, choice("optimizer", OPTIMIZERS)] = "adamw"
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the optimizer, such as `{b2: 0.95}`."""
    scheduler: Annotated[str, choice("scheduler", SCHEDULERS)] = "none"
    """Course of the learning rate after the warm-up. `none` and `constant` keep it; `wsd` keeps it
    until its decay at the end."""
    scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the scheduler: `decay_steps` of `linear`, `cosine` and `polynomial`; `power` of
    `polynomial`; `num_decay_steps` and `decay_type` (`linear`, `cosine`, `1-sqrt`) of `wsd`."""
    learning_rate_end: NotNegative | None = None
    """Final learning rate of the scheduler's decay; None: 0."""
    warmup_steps: StepPhase = 0
    """Steps in which the learning rate rises linearly to its highest value; below 1: their share of
    the run, as `warmup_ratio`."""
    warmup_ratio: Fraction = 0.0
    """Share of the steps of the run in which the learning rate rises, rounded up; instead of
    `warmup_steps`."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; norms and biases do not decay."""
    clip_grad: Positive | None = None
    """Largest global norm of the gradient; larger gradients are clipped. None: no clipping."""
    skip_bad_steps: StrictFlag = False
    """Skip a step if its loss or gradient is a spike or not finite; training continues with the
    next batch."""
    sigma_factor: Positive | None = 6.0
    """With `skip_bad_steps`: a loss or gradient norm is a spike if it exceeds the mean of the
    previous steps by this number of standard deviations. None: only values that are not finite are
    skipped."""
    rolling_interval_length: Annotated[int, Field(ge=4, le=100_000)] = 128
    """With `skip_bad_steps`: number of steps to compare a loss with. The run ends after the same
    number of consecutive skipped steps."""
    tx_mu_dtype: Annotated[str | None, dtype_name] = None
    """Dtype of the first moment of adamw and lion; None: the dtype of the parameter."""
    master_dtype: Annotated[Literal["float32"] | None, dtype_name] = "float32"
    """Dtype of the copy that the optimizer updates if parameters are stored in less than float32.
    None: the stored parameters are updated directly."""

    trainable_rules: Decisions = ()
    """Pairs `[pattern, true or false]` over the names of parameters. The first matching pair
    decides whether a parameter is trained; a parameter without a match is frozen. Without rules all
    parameters are trained."""
    frozen_parameters: NamePattern | None = None
    """Regular expression over the names of parameters that are not trained; all others are. Instead
    of `trainable_rules`."""
    learning_rate_rules: Factors = ()
    """Pairs `[pattern, factor]`: factors on the learning rates of the matching parameters."""
    weight_decay_rules: Amounts = ()
    """Pairs `[pattern, decay]`: weight decay of the matching parameters instead of `weight_decay`,
    including norms and biases."""
    disable_dropout: StrictFlag = False
    """Train without the dropout of the model and of its adapters."""
    quantization_mode: QuantizationMode | None = None
    """Quantization-aware training: the model computes with matrices that are rounded to this
    format, and the gradient ignores the rounding. The trained and the saved weights are not
    rounded, and `quantize` later gives the values with which the model was trained. Embeddings and
    the head are not rounded. `affine` is `int4` or `int8`, by `quantization_bits`."""
    quantization_bits: Annotated[int, Field(ge=2, le=8)] | None = None
    """Bits of a rounded value: 4 or 8 for `affine`, otherwise the bits of the format. None: 4 for
    `affine`."""
    quantization_group_size: Count | None = None
    """Number of values that share a scale. None: the default of the format."""

    num_train_epochs: Steps = 10
    """Number of passes over the data, unless `max_training_steps` is set."""
    max_training_steps: Steps | None = None
    """Number of optimizer steps of the whole run, including steps before a resume."""
    per_epoch_training_steps: Steps | None = None
    """Maximum number of steps of an epoch; the length of an epoch for data without a length. The
    data continue in the next epoch."""
    step_start_point: Annotated[int, Field(ge=0, le=LONGEST)] | None = None
    """Number of steps that count as done at the beginning of a new run: for the schedule of the
    learning rate, the steps of the run and the batches of a loader. Moments of the optimizer start
    at zero. A run that resumes continues at the step of its checkpoint."""
    force_step_start_point: StrictFlag = False
    """Apply `step_start_point` also to an `EasyDeLState` that counts other steps."""
    training_time_limit: Duration | None = None
    """Duration after which training stops as after Ctrl-C: seconds, `"90min"`, `"1h30m"`."""
    total_batch_size: Count = 32
    """Number of sequences of an optimizer step, over all hosts and microbatches."""
    gradient_accumulation_steps: Count = 1
    """Number of microbatches of an optimizer step; the result does not depend on it."""
    eval_batch_size: Count | None = None
    """Number of sequences per evaluation batch. None: the batches of the loader."""
    max_evaluation_steps: Steps | None = None
    """Number of batches that an evaluation reads from the held-out data; None: all."""
    image_feature_cache_gib: Positive | None = None
    """Host memory in GiB for the outputs of a frozen vision encoder. Equal images, also of later
    epochs, are then encoded once. The least recently used outputs are dropped. None: each step
    encodes the images of its rows."""
    max_length: Count | None = None
    """Length of a sequence, for code that builds the loader from these options."""
    seed: Seed = 42
    """Seed of all random numbers of training, except the order of the data."""

    save_directory: LocalDirectory = "EasyDeL-Checkpoints"
    """Directory of checkpoints, metrics and the trained model."""
    save_steps: Interval | None = None
    """Steps between checkpoints, or their share of the run below 1 (`0.1`); None: only at the end.
    SIGUSR1 saves a checkpoint at any time."""
    saves_per_epoch: TimesPerEpoch = None
    """Number of checkpoints in each epoch, the last one at its end; instead of `save_steps`."""
    save_strategy: TaskStrategy = None
    """`epoch`: a checkpoint at the end of each epoch, instead of `save_steps`. `steps`: every
    `save_steps`. `no`: only at the end. None: by `save_steps`."""
    save_interval_minutes: Positive | None = None
    """Minutes after a checkpoint after which the next one is saved, in addition to `save_steps`.
    The clock of the first process decides for all."""
    save_total_limit: Steps | None = None
    """Number of newest checkpoints to keep, in addition to the best. None: all."""
    do_last_save: bool = True
    """Save a checkpoint, and the model in Hugging Face layout, at the end of training."""
    merge_adapters: StrictFlag | None = None
    """Whether the adapters of the saved model are merged into its weights. None: yes, unless the
    weights are quantized. True also dequantizes such weights; false saves the adapters
    separately."""
    resume_if_possible: bool = True
    """Resume from the newest checkpoint in `save_directory`. False: move existing files aside."""
    mirror_address: str | None = None
    """Address that fsspec supports (`s3://bucket/run`, `gs://bucket/run`) to which complete
    checkpoints are copied in the background. A run continues from the copy if it is newer than
    `save_directory`."""
    memory_directory: str | None = None
    """Folder on a file system in memory for copies of the state: each process keeps its shards and
    those of one other process. A run continues from them if they are newer than the checkpoints.
    `elarge launch --elastic` sets a folder of its own for each process."""
    memory_save_steps: Steps = 10
    """With `memory_directory`: steps between copies in memory."""

    log_steps: Interval = 10
    """Steps between rows of the metrics, or their share of the run below 1; the first and the last
    step always have a row."""
    log_strategy: Strategy | None = None
    """`epoch`: a row at the end of each epoch, instead of `log_steps`. `no`: only the first and the
    last row. `steps` or None: by `log_steps`."""
    log_grad_norms: StrictFlag = False
    """Also log the norm of the gradient of each parameter of each layer, before clipping:
    `grad_norm/<name>`."""
    weight_distribution_log_steps: Steps | None = None
    """Steps between rows with the mean, standard deviation, minimum, maximum and histogram of each
    trained parameter that `weight_distribution_pattern` matches, plus one at the end:
    `weights/<name>/mean`. None: no such rows."""
    weight_distribution_pattern: NamePattern = ".*"
    """Regular expression over the names of parameters for `weight_distribution_log_steps`."""
    report_steps: Steps = 5
    """Steps between updates of the progress bar."""
    evaluation_steps: Interval | None = None
    """Steps between evaluations, or their share of the run below 1; None: only at the end."""
    evals_per_epoch: TimesPerEpoch = None
    """Number of evaluations in each epoch, the last one at its end; instead of
    `evaluation_steps`."""
    eval_strategy: TaskStrategy = None
    """`epoch`: an evaluation at the end of each epoch, instead of `evaluation_steps`. `steps`:
    every `evaluation_steps`. `no`: none, not even at the end. None: by `evaluation_steps`, and at
    the end."""
    eval_on_start: StrictFlag = False
    """Also evaluate before the first step."""
    save_best_k: BestCount = None
    """Number of best checkpoints to keep, in addition to the newest of `save_total_limit` (one, if
    `save_total_limit` is None)."""
    load_best_model_at_end: BestFlag = False
    """Use the best checkpoint instead of the last for the final model."""
    metric_for_best_model: str | None = None
    """Metric of an evaluation that selects the best checkpoint; None: the loss."""
    greater_is_better: StrictFlag | None = None
    """Whether a higher `metric_for_best_model` is better. None: no for names that end with `loss`,
    `perplexity`, `wer` or `cer`, yes for others."""
    ema_decay: FractionBelowOne | None = None
    """Decay of a running mean of the parameters, which is stored in float32 next to the
    parameters."""
    use_ema: StrictFlag = True
    """With `ema_decay`: use the mean for evaluation and for the final model. False: only store it
    in the checkpoints."""
    progress_bar_type: Annotated[
        str, choice("progress bar", ("rich", "json", "none"), {"tqdm": "rich"})
    ] = "rich"
    """`rich` (or `tqdm`) shows a bar, or prints a plain line about every ten seconds if standard
    output is not a terminal; `json` prints each row of metrics."""
    use_tensorboard: bool = True
    """Also write the metrics for TensorBoard, under `<save_directory>/tensorboard`."""
    report_to: TrackerNames = ()
    """Further trackers of the metrics: `wandb`, `trackio`, `mlflow`. Each tracker is an extra of
    ed-trainers."""
    project: str = "easydel"
    """Project of the run in a tracker; an experiment in mlflow."""
    run_name: str | None = None
    """Name of the run in a tracker; None: the last part of `save_directory`."""
    tracker_entity: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Team or user of the run in wandb, or Space of trackio; None: the account's, or no Space."""
    peak_flops_per_device: Positive | None = None
    """Peak FLOP/s of a device, for MFU. None: the known value of the device kind; without a known
    value no MFU is reported."""

    generation_interval: Steps | None = None
    """Steps between previews, plus one at the end: completions of some prompts with the current
    weights, in the terminal, the metrics and the report. None: no previews."""
    generation_prompts: CheckedPrompts = ()
    """Prompts of the previews: texts, or conversations (lists of messages with `role` and
    `content`). Without prompts, previews continue held-out documents."""
    generation_num_prompts: Annotated[int, Field(ge=1, le=64)] = 3
    """Number of held-out documents of a preview, without `generation_prompts`."""
    generation_max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Maximum number of tokens of a completion in a preview."""
    generation_temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Temperature of the previews; 0 selects the most probable token. None: 0, or 1 with
    `generation_do_sample`."""
    generation_do_sample: StrictFlag | None = None
    """Whether previews are sampled; None: if `generation_temperature` is above 0."""
    generation_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of the previews: sample from the most probable tokens with this total probability."""
    generation_top_k: Whole = 0
    """Previews are sampled from this number of most probable tokens; 0: all tokens."""
    generation_repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Penalty of the previews for tokens of the prompt and the completion; 1: none."""
    generation_presence_penalty: LogitPenalty = 0.0
    """Penalty of the previews for tokens of the completion; 0: none."""
    generation_frequency_penalty: LogitPenalty = 0.0
    """Penalty of the previews for each occurrence of a token in the completion; 0: none."""
    generation_num_return_sequences: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of sampled completions of each prompt of a preview."""
    generation_seed: Seed | None = None
    """Seed of the previews; None: `seed`. The number of the step is added."""
    generation_use_train_prompts: StrictFlag = False
    """Fill up the prompts to `generation_num_prompts` with beginnings of training documents."""
    generation_preview_print: StrictFlag = True
    """Print the completions of the previews in the terminal, too."""
    generation_log_to_wandb: StrictFlag = True
    """With `report_to: wandb`: show the completions of the previews there as a table."""
    benchmark_interval: Steps | None = None
    """Steps between runs of the `benchmarks`, plus one at the end; None: no runs."""
    benchmarks: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tasks of lm-evaluation-harness; their metrics are `benchmark/<task>/<metric>`. The section
    `eval` configures the runs."""
    benchmark_options: dict[str, object] = Field(default_factory=dict)
    """Keys of the section `eval` for the benchmarks, over those of the section."""
    profile_start_step: Steps | None = None
    """First step of a trace by jax's profiler, written to `<save_directory>/profile`; None: no
    trace. A step after the first excludes compilation from the trace."""
    profile_steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of traced steps."""

    @property
    def rows(self) -> RowKind | None:
        """Kind of the rows, if it depends on options; None: the kind that the method names."""
        return None

    @property
    def sequences_per_unit(self) -> int:
        """Number of sequences that `total_batch_size` counts as one."""
        return 1

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences of an optimizer step, over all hosts and microbatches."""
        return self.total_batch_size * self.sequences_per_unit

    @property
    def loader_batch_size(self) -> int:
        """Number of rows of a batch of the loader."""
        return self.sequences_per_step

    def default_length(self, positions: int | None) -> int:
        """Return the length of a sequence if no option sets it.

        Args:
            positions: maximum length of the model; None = unknown.
        """
        default = self.DEFAULT_LENGTH
        return default if positions is None else min(default, positions)

    @property
    def trained_parameters(self) -> Decisions:
        """The pairs that select the trained parameters: `trainable_rules`, or all but
        `frozen_parameters`."""
        if self.frozen_parameters is None:
            return self.trainable_rules
        return ((self.frozen_parameters, False), ("", True))

    @property
    def trains_mtp(self) -> bool:
        """Whether a loss trains the MTP layer of the model."""
        return False

    @property
    def simulated_format(self) -> EasyDeLQuantizationConfig | None:
        """The format in which products read the trained matrices; None: unrounded."""
        name, bits = self.quantization_mode, self.quantization_bits
        if name is None:
            return None
        name = f"int{bits or 4}" if name == "affine" else name
        size = self.quantization_group_size
        return EasyDeLQuantizationConfig(name, group_size=size, simulate=True)

    def count_warmup_steps(self, total_steps: int) -> int:
        """Return the number of steps of the warm-up in a run of `total_steps` steps."""
        share = self.warmup_ratio or (self.warmup_steps if self.warmup_steps < 1 else 0.0)
        return math.ceil(total_steps * share) or int(self.warmup_steps)

    def idle(self) -> list[tuple[str, str]]:
        """Return the options without effect because of other options of the method, each with the
        reason."""
        return []

    # Each validator belongs to the later of the two fields that it compares, so that the error has
    # the position of that field in the YAML file.

    @field_validator("optimizer_kwargs", "scheduler_kwargs")
    @classmethod
    def _known_settings(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        owner = str(info.field_name).removesuffix("_kwargs")
        name = info.data.get(owner)  # None: an invalid name is already reported
        table = OPTIMIZERS if owner == "optimizer" else SCHEDULERS
        return value if name is None else checked_settings(name, value, table)

    _data_keys: dict[str, object] = PrivateAttr(default_factory=dict)

    @property
    def data_keys(self) -> Mapping[str, object]:
        """The given keys of EasyDeL and TRL for rows: a run file has them in other sections."""
        return self._data_keys

    @model_validator(mode="wrap")
    @classmethod
    def _keep_data_keys(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        known = {*cls.model_fields, *cls.ALIASES}
        if known.issuperset(data):
            return handler(data)
        data_keys = {key: data[key] for key in data if key not in known and is_data_key(str(key))}
        arguments = handler({key: data[key] for key in data if key not in data_keys})
        arguments._data_keys = data_keys
        return arguments

    def replace(self, **changes: object) -> Self:
        """Return a validated copy with some changed fields."""
        return super().replace(**{**self._data_keys, **changes})

    #: Suggests a key of another method. `ed_trainers.arguments`, which knows the methods, sets it.
    suggest_other: ClassVar[Callable[[type[TrainingArguments], str], str] | None] = None

    @classmethod
    def _translate(cls, data: Mapping[str, object]) -> Mapping[str, object]:
        """Translate the keys of EasyDeL that stay among the options of a trainer."""
        known = {*cls.model_fields, *cls.ALIASES}
        if known.issuperset(data):
            return data
        # Imported here, because the options of this project need no translation.
        from ed_infra.easydel_translation import translate_arguments

        kind = cls.model_fields.get("trainer_type")
        method = "" if kind is None else str(kind.default)
        values, problems, note = translate_arguments(data, known, method)
        if problems:
            raise ValidationError.from_exception_data(
                cls.__name__, [problem(key, data.get(key), text) for key, text in problems]
            )
        if note:
            warnings.warn(note, stacklevel=5)
        return values

    @classmethod
    def _hint(cls, key: str) -> str:
        hint = super()._hint(key)
        suggest = TrainingArguments.suggest_other
        return hint if hint or suggest is None else suggest(cls, key)

    @field_validator("learning_rate_end")
    @classmethod
    def _decays(cls, value: float | None, info: ValidationInfo) -> float | None:
        scheduler = info.data.get("scheduler", "linear")
        if value is not None and scheduler not in DECAYING:
            raise conflict(
                f"learning_rate_end has no effect with scheduler {scheduler!r}: "
                f"omit it, or use one of {', '.join(DECAYING)}"
            )
        highest = info.data.get("learning_rate")
        if value is not None and highest is not None and value > highest:
            raise conflict(
                f"learning_rate_end {value:g} is above learning_rate {highest:g}, from which the "
                "schedule decays: lower learning_rate_end, or raise learning_rate"
            )
        return value

    @field_validator("warmup_ratio")
    @classmethod
    def _is_the_only_warmup(cls, value: float, info: ValidationInfo) -> float:
        steps = info.data.get("warmup_steps", 0)
        if value and steps:
            raise conflict(
                f"warmup_ratio {value:g} and warmup_steps {steps:g} both set the length of the "
                "warm-up: keep one"
            )
        return value

    @field_validator("frozen_parameters")
    @classmethod
    def _is_the_only_rule(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("trainable_rules"):
            raise conflict(
                "frozen_parameters and trainable_rules both select the trained parameters: keep "
                f"one. trainable_rules for this pattern are [[{value!r}, false], ['', true]]"
            )
        return value

    @field_validator("tx_mu_dtype")
    @classmethod
    def _has_moment(cls, value: str | None, info: ValidationInfo) -> str | None:
        optimizer = info.data.get("optimizer", "adamw")
        if value is not None and optimizer not in WITH_MU:
            raise conflict(
                f"tx_mu_dtype has no effect with optimizer {optimizer!r}: "
                f"only {' and '.join(WITH_MU)} use it"
            )
        return value

    @field_validator("quantization_bits", "quantization_group_size")
    @classmethod
    def _are_of_the_format(cls, value: int | None, info: ValidationInfo) -> int | None:
        mode = info.data.get("quantization_mode", "affine")
        return check_format_option(str(info.field_name), value, mode)

    @field_validator("generation_do_sample", "generation_num_return_sequences")
    @classmethod
    def _are_sampled(cls, value: int | None, info: ValidationInfo) -> int | None:
        temperature = info.data.get("generation_temperature")
        asked = info.data.get("generation_do_sample")
        if info.field_name == "generation_do_sample":
            if value and temperature == 0:
                raise conflict("generation_temperature 0 samples nothing: raise it, or omit it")
        elif value != 1 and not (temperature if asked is None else asked):
            raise conflict("completions without sampling are equal: set generation_temperature")
        return value

    @field_validator("step_start_point")
    @classmethod
    def _leaves_a_step(cls, value: int | None, info: ValidationInfo) -> int | None:
        total = info.data.get("max_training_steps")
        if value is not None and total is not None and value >= total:
            raise conflict(
                f"step_start_point {value} leaves no step: max_training_steps {total} includes the "
                "steps before it. Raise max_training_steps, or lower step_start_point"
            )
        return value

    @field_validator("force_step_start_point")
    @classmethod
    def _has_a_start(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("step_start_point") is None:
            raise conflict("force_step_start_point has no effect without step_start_point")
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

    @model_validator(mode="after")
    def _microbatches_are_whole(self) -> Self:
        count, total = self.gradient_accumulation_steps, self.sequences_per_step
        if total % count:
            text = "" if total == self.total_batch_size else f", which is {total} sequences,"
            raise conflict(
                f"total_batch_size {self.total_batch_size}{text} does not divide into {count} "
                "microbatches (gradient_accumulation_steps): total_batch_size counts the whole "
                "optimizer step"
            )
        return self

    @field_validator("mirror_address")
    @classmethod
    def _names_a_place(cls, value: str | None) -> str | None:
        scheme, sign, bucket_path = (value or "").partition("://")
        if sign and not bucket_path.strip("/"):
            raise conflict(
                f"mirror_address {value!r} names no bucket: write {scheme}://BUCKET/PATH"
            )
        return value


# Options that several methods add to those above. Their classes are the first base of a method's
# class, because pydantic uses a field of the first base.


class NoiseArguments(Options):
    """NEFTune (Jain et al., arXiv:2310.05914)."""

    neftune_noise_alpha: Positive | None = None
    """Magnitude of NEFTune's uniform noise on the embeddings: at most this value divided by the
    root of (tokens of the document times hidden size), in training only."""
