"""The settings of a run file for memory and time: of training and of serving."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ed_esurge.config import EngineConfig
from ed_infra.errors import ConfigError
from ed_infra.specs import FORMAT_OF_BITS, EasyDeLQuantizationConfig
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.groups import GRPOArguments

from ed_elarge.building.dtypes import plan_param_dtype
from ed_elarge.config.adaptation import LoftQSection, LoraSection
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.sections import add_rollout_defaults
from ed_elarge.plan.quantized import PlannedCodes

#: Layers of a specification of adapters without targets.
DEFAULT_TARGETS = r"^(?!lm_head$|score$|mtp[./])"
#: Methods of `speculative_config` without a model and without memory on the device.
_DRAFTS_OF_TEXT = ("ngram", "suffix")


@dataclass(frozen=True)
class StepForm:
    """How the train step of a method uses the model.

    Attributes:
        sides: sequences of the model for each row of a batch.
        samples: whether an engine samples the rows from the trained weights.
        chunk: tokens whose logits exist at the same time, unless `lmhead_chunksize` is set.
    """

    sides: int = 1
    samples: bool = False
    chunk: int = 1024


_PAIRS = StepForm(sides=2)
_SAMPLES = StepForm(samples=True, chunk=256)
#: Methods whose train steps a plan knows. The chunks are `ed_layers.losses.DEFAULT_CHUNK` and
#: `ed_trainers.losses.policy.POLICY_CHUNK`.
STEP_FORMS: dict[str, StepForm] = {
    "sft": StepForm(),
    **dict.fromkeys(("dpo", "cpo", "orpo"), _PAIRS),
    **dict.fromkeys(("grpo", "gspo", "rlvr"), _SAMPLES),
}
#: Arrays of a batch with one value for each token.
_TOKEN_ARRAYS = ("input_ids", "segment_ids", "position_ids", "targets", "weights")
#: Arrays of sampled rows with one value for each row.
ROW_ARRAYS = ("advantages", "rewards", "scored", "present", "tokens")


@dataclass(frozen=True)
class Serving:
    """Settings of the engine.

    Attributes:
        options: the section `esurge`.
        dtype, param_dtype: dtypes of the computation and of the stored parameters.
        kv_dtype: dtype of keys and values.
        kv_group: numbers of a head that share a scale, for 8-bit keys and values; None = all.
        codes: format of quantized weights; None = they have the parameter dtype.
    """

    options: EngineConfig
    dtype: str
    param_dtype: str
    kv_dtype: str
    kv_group: int | None
    codes: PlannedCodes | None = None


@dataclass(frozen=True)
class Training:
    """Settings of a train step.

    Attributes:
        arguments: options of the trainer.
        rows: rows of an optimizer step.
        accumulation: microbatches of an optimizer step.
        length: tokens of a sequence.
        dtype, param_dtype: dtypes of the computation and of the stored parameters.
        remat: policy of `gradient_checkpointing`; empty = all values are kept.
        targets: names that the policy keeps or excludes.
        chunk: tokens whose logits exist at the same time on a device.
        lora: adapters; None = all parameters are trained.
        form: how the step uses the model.
        has_reference: whether training needs a reference.
        token_arrays: arrays of a batch with one value for each token.
        forwards: forward passes without gradient for each row, in the step or before it.
        engine: settings of the engine that samples; None = no samples.
        codes: format of the quantized base of adapters; None = it has the parameter dtype.
    """

    arguments: TrainingArguments
    rows: int
    accumulation: int
    length: int
    dtype: str
    param_dtype: str
    remat: str
    targets: tuple[str, ...]
    chunk: int
    lora: LoraSection | None
    form: StepForm = StepForm()
    has_reference: bool = False
    token_arrays: tuple[str, ...] = _TOKEN_ARRAYS
    forwards: float = 0.0
    engine: Serving | None = None
    codes: PlannedCodes | None = None

    @property
    def microbatch(self) -> int:
        """Rows of a microbatch over all devices."""
        return self.rows // self.accumulation

    @property
    def sequences(self) -> int:
        """Sequences of a microbatch over all devices."""
        return self.microbatch * self.form.sides

    @property
    def refers(self) -> bool:
        """Whether the step runs the reference; sampled rows contain its log-probabilities."""
        return self.has_reference and not self.form.samples

    @property
    def has_copy(self) -> bool:
        """Whether the reference is a second model; adapters have their base as the reference."""
        return self.has_reference and self.lora is None


def training(run: RunConfig) -> Training:
    """Return the settings of a run that trains.

    Raises:
        ConfigError: a plan does not know the method, or cannot know the length of a sequence.
    """
    arguments = run.trainer
    if arguments is None:
        raise run.missing("trainer")
    if run.method not in STEP_FORMS:
        raise ConfigError(
            f"elarge plan knows the train step of {', '.join(STEP_FORMS)}, and trainer_type is "
            f"{run.method!r}"
        )
    if arguments.quantization_mode is not None:
        raise ConfigError("elarge plan does not know quantization_mode: omit it")
    if run.lora is not None and run.lora.name_or_path is not None:
        raise ConfigError("elarge plan knows new adapters: replace lora.name_or_path by lora.rank")
    if arguments.trained_parameters:
        raise ConfigError(
            "elarge plan does not know trainable_rules and frozen_parameters: omit them, or use "
            "lora"
        )
    form = STEP_FORMS[run.method]
    length, _ = run.sequence_length
    if isinstance(arguments, GRPOArguments):
        length = arguments.row_length
    if length is None:
        raise ConfigError("the length of a sequence is unknown: set trainer.max_length")
    fields = run.execution_fields()
    reads = getattr(arguments, "has_reference", False)
    ahead = getattr(arguments, "precompute_ref_log_probs", False)
    chunk = getattr(arguments, "lmhead_chunksize", None)
    targets = fields["gradient_checkpointing_targets"] or ()
    return Training(
        arguments=arguments,
        rows=arguments.sequences_per_step,
        accumulation=arguments.gradient_accumulation_steps,
        length=length,
        dtype=run.loader.dtype,
        param_dtype=plan_param_dtype(run),
        remat=fields["gradient_checkpointing"],
        targets=tuple(targets),
        chunk=chunk or form.chunk,
        lora=run.adapters,
        form=form,
        has_reference=reads and not ahead,
        token_arrays=token_arrays(arguments),
        forwards=_forwards(arguments, reads and not ahead),
        engine=_sampling(run, arguments) if isinstance(arguments, GRPOArguments) else None,
        codes=plan_codes(run),
    )


def token_arrays(arguments: TrainingArguments) -> tuple[str, ...]:
    """Return the names of the arrays of a batch with one value for each token."""
    if not isinstance(arguments, GRPOArguments):
        return _TOKEN_ARRAYS
    more = {
        "old_logps": arguments.keeps_old,
        "reference_logps": arguments.has_reference,
        "correction": arguments.corrects,
    }
    return (*_TOKEN_ARRAYS, *(name for name, exists in more.items() if exists))


def _forwards(arguments: TrainingArguments, refers: bool) -> float:
    if not isinstance(arguments, GRPOArguments):
        return float(refers)
    return (arguments.keeps_old + refers) / arguments.num_iterations


def _sampling(run: RunConfig, arguments: GRPOArguments) -> Serving:
    """Return the settings of the engine of rollouts."""
    serving_settings = serving(run)
    options = add_rollout_defaults(
        serving_settings.options,
        length=arguments.row_length,
        completions=arguments.completions_per_generation,
        benchmarks=bool(arguments.benchmarks and arguments.benchmark_interval),
    )
    return replace(serving_settings, options=options)


def serving(run: RunConfig) -> Serving:
    """Return the settings of a run that serves.

    Raises:
        ConfigError: the weights are quantized, or a draft model is served.
    """
    options = run.esurge
    speculative_config = options.speculative_config
    if speculative_config is not None and speculative_config.method not in _DRAFTS_OF_TEXT:
        raise ConfigError(
            "elarge plan does not know the memory of drafts by a model or by an MTP layer: omit "
            "esurge.speculative_config"
        )
    fields = run.execution_fields()
    loader, cache = run.loader, fields["kv_cache_quantization_config"]
    dtype = fields["kvdtype"] or fields["attn_dtype"] or loader.dtype
    group = None
    if cache is not None:
        dtype, group = str(cache.dtype), cache.group_size
    codes = plan_codes(run)
    return Serving(options, loader.dtype, loader.param_dtype, dtype, group, codes)


def plan_codes(run: RunConfig) -> PlannedCodes | None:
    """Return the format of the weights that a run quantizes, or None.

    Raises:
        ConfigError: weights are trained in a format.
    """
    section, lora = run.weight_format, run.lora
    if section is None and lora is not None and lora.init_lora_weights == "loftq":
        bits = LoftQSection() if lora.loftq_config is None else lora.loftq_config
        targets = "|".join(f"(?:{one})" for one in lora.targets or (DEFAULT_TARGETS,))
        pattern = rf"^(?!.*\bexperts\b).*?(?:{targets})"  # no codes of experts
        name = FORMAT_OF_BITS[bits.loftq_bits]
        return PlannedCodes(name, pattern=pattern, matrices=("kernel",))
    if section is None:
        return None
    if section.simulate:
        raise ConfigError(
            "elarge plan does not know training in a format (simulate): omit quantization.model"
        )
    keys: dict[str, Any] = {
        "group_size": section.group_size,
        "double_quantization": section.double_quantization,
    }
    if section.pattern is not None:
        keys["pattern"] = section.pattern
    spec = EasyDeLQuantizationConfig(section.quantization_method, **keys)
    return PlannedCodes(spec.dtype, spec.group_size, spec.double_quantization, spec.pattern)
