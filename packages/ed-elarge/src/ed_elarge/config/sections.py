"""Sections of a run file that belong to this package.

A section that configures another package uses the option class of that package.
`ed_elarge.config.action_options` contains the options of actions, and `ed_elarge.config.table`
lists all sections. Dtypes, meshes and mechanisms are strings here, so no module imports jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ed_esurge.config import EngineConfig
from ed_infra.config.fields import FIELDS, canonical_field
from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import ConfigError
from ed_infra.options import Count, Options, Seed, Whole, choice, dtype_name
from ed_trainers.options.online import EnvironmentName
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    field_validator,
    model_validator,
)

from ed_elarge.config.local_tasks import LocalTask, check_task_names
from ed_elarge.heldout_tasks import HELDOUT_TASKS

MAX_DEVICES = 2**20
#: Parametrizations of a model: which initial values and learning rates its matrices have.
PARAMETRIZATIONS = ("standard", "mup")

VocabularySize = Annotated[int, Field(ge=1, le=2**24)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Probability = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


class TokenizerTraining(Options):
    """Train a byte-level BPE tokenizer on the training texts of the mixture.

    A new model of speech gets a processor: its feature extractor, and this tokenizer. The labels of
    a CTC model are the characters of the texts, and `vocab_size` is their largest number.
    """

    vocab_size: Annotated[int, Field(ge=259, le=2**22)]
    """Number of tokens: at least 256 bytes and three special tokens."""
    min_frequency: Count = 2
    """Pairs with a lower frequency are not merged."""


class TokenizerSection(Options):
    """`model.tokenizer` as a mapping: the tokenizer and its chat template."""

    ALIASES: ClassVar[Mapping[str, str]] = {"path": "name_or_path"}

    name_or_path: Name | None = None
    """A directory or a hub id. None: the tokenizer of the model."""
    train: TokenizerTraining | None = None
    """Train a new tokenizer on the texts of this run."""
    chat_template: Name | None = None
    """A Jinja template for chats: its text, the path of a file, or `chatml`. Training, generation
    and serving use the template, and the saved model contains it (`chat_template.jinja`). None: the
    template of the tokenizer."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizerSection:
        if self.name_or_path is not None and self.train is not None:
            raise ValueError(
                "name_or_path and train exclude each other: load a tokenizer, or train one"
            )
        return self


def _tokenizer_kind(value: object) -> str:
    return "section" if isinstance(value, (Mapping, TokenizerSection)) else "path"


TokenizerOption = Annotated[
    Annotated[Name, Tag("path")] | Annotated[TokenizerSection, Tag("section")],
    Discriminator(_tokenizer_kind),
]


#: Tasks that trainers and the engine support.
_TASKS = (
    TaskType.CAUSAL_LM,
    TaskType.SEQUENCE_TO_SEQUENCE,
    TaskType.IMAGE_TEXT_TO_TEXT,
    TaskType.ANY_TO_ANY,
    TaskType.SPEECH_SEQUENCE_TO_SEQUENCE,
    TaskType.CTC,
    TaskType.MASKED_LM,
    TaskType.TOKEN_CLASSIFICATION,
    TaskType.SEQUENCE_CLASSIFICATION,
    TaskType.EMBEDDING,
    TaskType.IMAGE_CLASSIFICATION,
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION,
    TaskType.AUTO_BIND,
)


#: Tasks of models that read no text, and so have no tokenizer.
WITHOUT_TEXT = (TaskType.IMAGE_CLASSIFICATION,)


def _task(value: Any) -> Any:
    try:
        task = canonical_task(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if task not in _TASKS:
        task_names = ", ".join(task.value for task in _TASKS)
        raise ValueError(f"trainers and engine support no models for {task.value!r} ({task_names})")
    return task


def _computes(dtype: str) -> str:
    if dtype not in ("bfloat16", "float16", "float32", "float64"):
        raise ValueError(
            f"{dtype} is no dtype for computation or weights: use bfloat16, float16 or float32"
        )
    return dtype


def _exact(dtype: object) -> Any:
    if isinstance(dtype, str) and dtype.strip().lower() == "float":
        raise ValueError(
            "'float' has 32 bits in torch and 64 bits in numpy: write float32 or float64"
        )
    return dtype


FloatDtype = Annotated[str, AfterValidator(_computes), dtype_name, BeforeValidator(_exact)]


class LoadingExtras(Options):
    """`model.extra_kwargs`: further arguments for loading."""

    trust_remote_code: bool = False
    """Run Python code from the tokenizer's repository."""
    revision: Name | None = None
    """Branch, tag or commit of a hub repository."""


class ModelSection(Options):
    """The model: a checkpoint, or a configuration of a new model."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "pretrained_model_name_or_path": "name_or_path",
        "path": "name_or_path",
    }

    name_or_path: Name | None = None
    """A directory in Hugging Face layout, or a hub id."""
    config: dict[str, Any] | None = None
    """Configuration of a new model (`model_type` and its keys) with random weights."""
    tokenizer: TokenizerOption | None = None
    """A directory, a hub id, or a section. None: the tokenizer of the model."""
    task: Annotated[TaskType, BeforeValidator(_task)] | None = None
    """Task of the model. `auto-bind` reads it from the checkpoint. None: the default task of the
    trainer's method, or `causal-language-model` without a trainer."""
    resize_token_embeddings: StrictBool | VocabularySize = False
    """Add rows to the embedding and the head for the ids of the tokenizer, as transformers does:
    close to the mean of the old rows. A number is the number of rows. The saved model has these
    rows. With `lora`, the new rows are trained if `modules_to_save` names the modules."""
    parametrization: Annotated[str, choice("parametrization", PARAMETRIZATIONS)] = "standard"
    """`mup` scales the initial values and the learning rate of each matrix by its width, so that
    the best learning rate is the same at each width (arXiv 2203.03466, table 3). The saved model is
    an ordinary checkpoint. A model of `name_or_path` keeps its values."""
    base_widths: dict[Name, Count] = Field(default_factory=dict)
    """With `mup`: fields of the base model, which has the same values in both parametrizations,
    such as `{hidden_size: 256, intermediate_size: 768, num_attention_heads: 4}`. With
    `num_hidden_layers`, the outputs of attention and feed-forward are scaled by the depth, too
    (arXiv 2505.01618)."""
    extra_kwargs: LoadingExtras = LoadingExtras()

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.name_or_path is None) == (self.config is None):
            raise ValueError(
                "set either name_or_path (an existing model) or config (a new model), and not both"
            )
        if self.config is not None and self.resize_token_embeddings:
            raise ValueError(
                "resize_token_embeddings changes an existing model: omit it, and set vocab_size in "
                "config"
            )
        if self.has_widths != bool(self.base_widths):
            raise ValueError(
                "parametrization: mup and base_widths belong together: set both, such as "
                "base_widths: {hidden_size: 256, num_attention_heads: 4}, or omit both"
            )
        return self

    @property
    def has_widths(self) -> bool:
        """Whether the widths of the model determine its initial values and learning rates."""
        return self.parametrization != "standard"

    @property
    def tokenizer_section(self) -> TokenizerSection:
        """`tokenizer` as a section."""
        if isinstance(self.tokenizer, TokenizerSection):
            return self.tokenizer
        return TokenizerSection(name_or_path=self.tokenizer)

    @property
    def tokenizer_key(self) -> str:
        """The key of this section that names the source of the tokenizer."""
        return "name_or_path" if self.tokenizer is None else "tokenizer"


class OtherModelSection(Options):
    """A frozen model that the method reads; it is loaded on the mesh of the trained model."""

    ALIASES: ClassVar[Mapping[str, str]] = ModelSection.ALIASES

    name_or_path: Name
    """A directory in Hugging Face layout, or a hub id."""
    revision: Name | None = None
    """Branch, tag or commit of a hub repository."""


def _hugging_face(value: bool | None) -> bool | None:
    if value is False:
        raise ValueError(
            "models are read in Hugging Face layout: omit the key, and convert a checkpoint of a "
            "run with `elarge convert CHECKPOINT DIRECTORY`"
        )
    return value


class LoaderSection(Options):
    """Dtypes and precision of the model."""

    dtype: FloatDtype = "float32"
    """Computation dtype."""
    param_dtype: FloatDtype = "float32"
    """Storage dtype of the parameters. Frozen models (the base of adapters, a reference, a teacher)
    keep the dtype of their files unless the key is set."""
    precision: Annotated[str | None, choice("precision", ("default", "high", "highest"))] = None
    """Precision of float32 matrix products on accelerators. On a CPU with AMX, high multiplies
    bfloat16 parts of many rows, with an error of 5e-6. None: the default of jax."""
    from_torch: Annotated[bool | None, AfterValidator(_hugging_face)] = None
    """The model is stored in Hugging Face layout. Only true is accepted: every model is."""
    trust_remote_code: bool = False
    """Run Python code from the tokenizer's repository."""
    verbose: bool = False
    """Print the parameters of the model with shapes and shardings."""


class SetsConfig(Options):
    """A section whose keys set fields of the model's configuration."""

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Return field -> (path of its key in the section, value), for the keys that are set.

        A field has the name of the key, or one of its aliases.
        """
        names = {key: alias for alias, key in self.ALIASES.items()}
        return {
            names.get(key, key): ((key,), getattr(self, key))
            for key in self.model_fields_set
            if names.get(key, key) in FIELDS and getattr(self, key) is not None
        }


class ShardingSection(SetsConfig):
    """The device mesh and the sharding of the model, as fields of its configuration."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "sharding_axis_dims": "axis_dims",
        "sharding_axis_names": "axis_names",
        "sharding_dcn_axis_dims": "dcn_axis_dims",
    }

    axis_dims: tuple[int, ...] = (1, -1, 1, 1, 1)
    """Devices along each axis; one entry may be -1 for all remaining devices."""
    axis_names: tuple[Name, ...] = ("dp", "fsdp", "ep", "tp", "sp")
    """Names of the axes; other names need `partition_axis`."""
    dcn_axis_dims: tuple[int, ...] | None = None
    """Slices or hosts along each axis, for a mesh over a data-center network."""
    partition_axis: dict[str, Any] | None = None
    """Kind of dimension -> the mesh axis, or the list of axes, over which it is split:
    `{batch_axis: [fsdp, dp], head_axis: tp}`. None: the value of `base_config`."""
    partition_rules: tuple[tuple[str, tuple[Any, ...]], ...] | None = None
    """Pairs of a regular expression for parameter names and the mesh axis of each dimension, such
    as `[["embed_tokens", [tp, fsdp]]]`. The first match replaces the derived sharding."""
    auto_shard_model: bool = True
    """False: parameters are replicated instead of sharded."""
    use_ring_of_experts: bool | None = None
    """Route tokens to experts in a ring. None: the value of `base_config`."""
    fsdp_is_ep_bound: bool | None = None
    """Also shard experts over fsdp, if their number divides. None: the value of `base_config`."""
    sp_is_ep_bound: bool | None = None
    """Also shard experts over sp, if their number divides. None: the value of `base_config`."""

    @model_validator(mode="after")
    def _fits(self) -> ShardingSection:
        names = self.axis_names
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"axis_names {list(names)}: {name!r} occurs {count} times")
        for key in ("axis_dims", "dcn_axis_dims"):
            dims = getattr(self, key)
            if dims is None:
                continue
            if len(dims) != len(names):
                raise ValueError(
                    f"{key} has {len(dims)} entries {list(dims)}, but there are {len(names)} axes "
                    f"{list(names)}"
                )
            if any(dim < 1 and dim != -1 for dim in dims):
                raise ValueError(f"{key} {list(dims)}: each entry must be positive, or -1")
            if list(dims).count(-1) > 1:
                raise ValueError(f"{key} {list(dims)}: only one entry may be -1")
            if math.prod(dim for dim in dims if dim != -1) > MAX_DEVICES:
                raise ValueError(f"{key} {list(dims)} exceeds the limit of {MAX_DEVICES} devices")
        if self.partition_rules is not None and not self.auto_shard_model:
            raise ValueError(
                "auto_shard_model: false replicates every parameter, and partition_rules shard "
                "some: keep one of them"
            )
        return self

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        fields = super().config_fields()
        if not self.auto_shard_model:
            fields["sharding_rules"] = (("auto_shard_model",), ((".*", ()),))
        elif self.partition_rules is not None:
            fields["sharding_rules"] = (("partition_rules",), self.partition_rules)
        return fields


class PlatformSection(SetsConfig):
    """Devices and kernels of the model."""

    backend: Annotated[str | None, choice("backend", ("cpu", "gpu", "tpu"))] = None
    """Devices of the mesh. None: the default of jax."""
    platform: Annotated[str | None, choice("platform", ("jax", "triton", "pallas"))] = None
    """Language of the attention kernels. None: the best available one."""


class BaseConfigSection(SetsConfig):
    """Overrides of the model's configuration: execution fields and architecture keys."""

    values: dict[str, Any] = Field(default_factory=dict)
    """Field of the configuration -> its value."""
    operation_configs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Mechanism -> its block sizes."""

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        fields: dict[str, tuple[tuple[str, ...], Any]] = {
            canonical_field(key): (("values", key), value) for key, value in self.values.items()
        }
        if self.operation_configs:
            fields["operation_configs"] = (("operation_configs",), self.operation_configs)
        return fields


class TrainingEngineSection(EngineConfig):
    """The engine of a training run, for its completions and benchmarks.

    The section has the keys of the section `esurge`. A key replaces that of `esurge` during
    training; the actions after training use `esurge` alone.
    """


class AsynchronousSection(Options):
    """Online training with engines and rewards in processes of their own."""

    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of generations by which sampling may be ahead of training: a token is sampled with the
    weights before at most this number of generations. 0: the results of training in one process."""
    engines: Annotated[int, Field(ge=0, le=1024)] = 1
    """Engine processes on the host of the trainer. 0: only engines that join from other hosts."""
    environment: EnvironmentName | None = None
    """Other place of `trainer.environment`."""
    environment_processes: Annotated[int, Field(ge=0, le=1024)] = 1
    """Processes on the host of the trainer with the environments and the reward functions."""
    listen: Annotated[str, Field(pattern=r"^[^:\s]+:\d{1,5}$")] = "127.0.0.1:0"
    """Address for the processes, `HOST:PORT`; port 0: a free port. Other hosts join with `elarge
    join HOST:PORT --as engine` and the same ESURGE_CLUSTER_SECRET."""


class EvalSection(Options):
    """Options of lm-evaluation-harness, under its own names, and tasks on local files."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "fewshot": "num_fewshot",
        "max_gen_toks": "max_new_tokens",
    }

    tasks: tuple[Name, ...] = ()
    """Tasks of the action `eval` if the action lists none."""
    local_tasks: tuple[LocalTask, ...] = ()
    """Tasks on local files. Without `tasks`, all of them run."""
    include_path: tuple[Name, ...] = ()
    """Directories with further task files."""
    num_fewshot: Whole | None = None
    """Number of examples in a prompt. None: the value of each task."""
    max_new_tokens: Count = 256
    """Maximum length of a generated answer, unless the task sets one."""
    temperature: Temperature | None = None
    """Sampling temperature of generated answers; 0 is greedy. None: the value of each task."""
    top_p: Probability | None = None
    """Nucleus of generated answers. None: the value of each task."""
    batch_size: Count = 512
    """Requests that the engine receives at a time; the results do not depend on the number."""
    use_tqdm: bool = True
    limit: Annotated[float, Field(gt=0, lt=2**31)] | None = None
    """Examples per task; below 1, the fraction of them."""
    cache_requests: bool = False
    check_integrity: bool = False
    write_out: bool = False
    log_samples: bool = False
    """Write each example with its answer to the result file."""
    confirm_run_unsafe_code: bool = False
    """Run the code that the model writes for tasks such as `humaneval`, on this machine."""
    bootstrap_iters: Whole = 1000
    """Resamplings for standard errors of metrics that are no means, such as a perplexity. 0 omits
    all standard errors."""
    apply_chat_template: StrictBool | StrictStr = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = False
    gen_kwargs: dict[str, Any] | None = None
    predict_only: bool = False
    random_seed: Seed = 0
    numpy_random_seed: Seed = 1234
    fewshot_random_seed: Seed = 1234
    output_path: Name | None = None
    """JSON file for the results. None: `eval/results.json` in the directory of the trainer; without
    a trainer the results are only printed."""
    print_results: bool = True

    @field_validator("local_tasks")
    @classmethod
    def _separate_names(cls, value: tuple[LocalTask, ...]) -> tuple[LocalTask, ...]:
        check_task_names(value, HELDOUT_TASKS)
        return value


def add_rollout_defaults(
    config: EngineConfig, *, length: int, completions: int | None = None, benchmarks: bool = False
) -> EngineConfig:
    """Return options with the defaults of an engine for rollouts; options that are set stay.

    Programs compile at first use, and the engine prints nothing. The context has the length of a
    row, and the engine runs at most the completions of a generation at the same time, because
    pages for more would never be used.

    Args:
        config: options of the section `esurge`.
        length: tokens of a row.
        completions: completions of a generation; None = unknown.
        benchmarks: whether benchmarks use the engine; their prompts may exceed a row.
    """
    defaults: dict[str, Any] = {"compile_runner": False, "silent_mode": True}
    if not benchmarks:
        defaults["max_model_len"] = length
        if completions is not None:
            defaults["max_num_seqs"] = min(config.max_num_seqs, completions)
    return config.replace(**{k: v for k, v in defaults.items() if k not in config.model_fields_set})
