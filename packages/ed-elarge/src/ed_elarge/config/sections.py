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

from ed_infra.config.fields import FIELDS, canonical_field
from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import ConfigError
from ed_infra.options import Options, choice, dtype_name
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)

MAX_DEVICES = 2**20

Positive = Annotated[int, Field(gt=0, lt=2**31)]
NotNegative = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Probability = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


class TokenizerTraining(Options):
    """Train a byte-level BPE tokenizer on the training texts of the mixture."""

    vocab_size: Annotated[int, Field(ge=259, le=2**22)]
    """Tokens; at least the 256 bytes and the three special ones."""
    min_frequency: Positive = 2
    """Pairs seen less often are not merged."""


class TokenizerSection(Options):
    """`model.tokenizer` as a mapping: which tokenizer, and its chat template."""

    ALIASES: ClassVar[Mapping[str, str]] = {"path": "name_or_path"}

    name_or_path: Name | None = None
    """A directory or a hub id. None: the model's own."""
    train: TokenizerTraining | None = None
    """Train a new tokenizer instead, on the texts of this run."""
    chat_template: Name | None = None
    """A Jinja template for chats: its text, or the path of a file. Training, generation and serving
    use the template, and the saved model contains it (`chat_template.jinja`). None: the template
    that the tokenizer has."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizerSection:
        if self.name_or_path is not None and self.train is not None:
            raise ValueError(
                "name_or_path and train exclude each other: load a tokenizer, or train one"
            )
        return self


def _tokenizer_kind(value: Any) -> str:
    return "section" if isinstance(value, (Mapping, TokenizerSection)) else "path"


Tokenizer = Annotated[
    Annotated[str, Tag("path")] | Annotated[TokenizerSection, Tag("section")],
    Discriminator(_tokenizer_kind),
]


#: Tasks that trainers and the engine support.
TASKS = (
    TaskType.CAUSAL_LM,
    TaskType.SEQUENCE_TO_SEQUENCE,
    TaskType.IMAGE_TEXT_TO_TEXT,
    TaskType.SEQUENCE_CLASSIFICATION,
    TaskType.EMBEDDING,
    TaskType.AUTO_BIND,
)


def _task(value: Any) -> Any:
    try:
        task = canonical_task(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if task not in TASKS:
        known = ", ".join(task.value for task in TASKS)
        raise ValueError(f"trainers and engine support no models for {task.value!r} ({known})")
    return task


def _computes(dtype: str) -> str:
    if dtype not in ("bfloat16", "float16", "float32", "float64"):
        raise ValueError(
            f"{dtype} is not a dtype to compute in or to hold weights in: take bfloat16, float16 "
            "or float32"
        )
    return dtype


FloatDtype = Annotated[str, AfterValidator(_computes), dtype_name]


class LoadingExtras(Options):
    """`model.extra_kwargs`: arguments of loading that have no key of their own."""

    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own Python code."""
    revision: Name | None = None
    """Branch, tag or commit of a hub repository."""


class ModelSection(Options):
    """Which model: an existing one, or a configuration to train from scratch."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "pretrained_model_name_or_path": "name_or_path",
        "path": "name_or_path",
    }

    name_or_path: Name | None = None
    """A directory in Hugging Face layout, or a hub id."""
    config: dict[str, Any] | None = None
    """A model configuration (`model_type` and its keys): the weights start random."""
    tokenizer: Tokenizer | None = None
    """A directory, a hub id, or a section. None: the model's own."""
    task: Annotated[TaskType, BeforeValidator(_task)] | None = None
    """Task of the model. `auto-bind` reads it from the checkpoint. None: the default task of the
    trainer's method, or `causal-language-model` without a trainer."""
    extra_kwargs: LoadingExtras = LoadingExtras()

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.name_or_path is None) == (self.config is None):
            raise ValueError(
                "give either name_or_path (an existing model) or config (a new one, trained from "
                "scratch), and not both"
            )
        given = self.tokenizer_section
        if self.config is not None and given.name_or_path is None and given.train is None:
            raise ValueError(
                "no tokenizer is set, and a model that is built from a config has no tokenizer of "
                "its own: give tokenizer: PATH or tokenizer: {train: {vocab_size: N}}"
            )
        return self

    @property
    def tokenizer_section(self) -> TokenizerSection:
        """`tokenizer` as a section, however it was written."""
        if isinstance(self.tokenizer, TokenizerSection):
            return self.tokenizer
        return TokenizerSection(name_or_path=self.tokenizer)


class OtherModelSection(Options):
    """A model that does not learn, beside the one that does: loaded on the same mesh."""

    ALIASES: ClassVar[Mapping[str, str]] = ModelSection.ALIASES

    name_or_path: Name
    """A directory in Hugging Face layout, or a hub id."""
    revision: Name | None = None
    """Branch, tag or commit of a hub repository."""


class LoaderSection(Options):
    """How the weights are held and computed with."""

    dtype: FloatDtype = "float32"
    """Computation dtype."""
    param_dtype: FloatDtype = "float32"
    """Storage dtype of the parameters."""
    precision: Annotated[str | None, choice("precision", ("default", "high", "highest"))] = None
    """Precision of float32 matrix products on accelerators; None is jax's own default."""
    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own Python code."""
    verbose: bool = False
    """Print the model's parameters with their shapes and shardings once it is built."""


class SetsConfig(Options):
    """A section whose keys set fields of the model's configuration."""

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Field -> (the key that sets it, as a path in the section; the value), where one was set.

        A field has the name of the key, or its other spelling.
        """
        names = {key: other for other, key in self.ALIASES.items()}
        return {
            names.get(key, key): ((key,), getattr(self, key))
            for key in self.model_fields_set
            if names.get(key, key) in FIELDS and getattr(self, key) is not None
        }


class ShardingSection(SetsConfig):
    """The device mesh and what is laid over it; becomes fields of the model's config."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "sharding_axis_dims": "axis_dims",
        "sharding_axis_names": "axis_names",
        "sharding_dcn_axis_dims": "dcn_axis_dims",
    }

    axis_dims: tuple[int, ...] = (1, -1, 1, 1, 1)
    """Devices along each axis; one -1 takes what remains."""
    axis_names: tuple[Name, ...] = ("dp", "fsdp", "ep", "tp", "sp")
    """Names of the axes; others than these need `partition_axis` in `base_config.values`."""
    dcn_axis_dims: tuple[int, ...] | None = None
    """Slices or hosts along each axis, for meshes that span a data-centre network."""
    auto_shard_model: bool = True
    """False: parameters are replicated instead of sharded."""
    use_ring_of_experts: bool | None = None
    """Send tokens round the experts in a ring. None: as `base_config` says."""
    fsdp_is_ep_bound: bool | None = None
    """Split experts over fsdp too, where their number divides. None: as `base_config` says."""
    sp_is_ep_bound: bool | None = None
    """Split experts over sp too, where their number divides. None: as `base_config` says."""

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
                raise ValueError(f"{key} {list(dims)} take more devices than any machine has")
        return self

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Field -> (key, value)."""
        fields = super().config_fields()
        if not self.auto_shard_model:
            fields["sharding_rules"] = (("auto_shard_model",), ((".*", ()),))
        return fields


class PlatformSection(SetsConfig):
    """Where and by which kernels the model runs."""

    backend: Annotated[str | None, choice("backend", ("cpu", "gpu", "tpu"))] = None
    """Devices of the mesh. None: jax's default."""
    platform: Annotated[str | None, choice("platform", ("jax", "triton", "pallas"))] = None
    """Language of attention kernels. None: the best there is."""


class BaseConfigSection(SetsConfig):
    """Overrides of the model's configuration: execution fields and architecture keys alike."""

    values: dict[str, Any] = Field(default_factory=dict)
    """Field of the configuration -> its value."""
    operation_configs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Mechanism -> its block sizes."""

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Field -> (key, value)."""
        fields: dict[str, tuple[tuple[str, ...], Any]] = {
            canonical_field(key): (("values", key), value) for key, value in self.values.items()
        }
        if self.operation_configs:
            fields["operation_configs"] = (("operation_configs",), self.operation_configs)
        return fields


class EvalSection(Options):
    """How lm-evaluation-harness is run. Its own names; each is passed on or acted on."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "fewshot": "num_fewshot",
        "max_gen_toks": "max_new_tokens",
    }

    tasks: tuple[Name, ...] = ()
    """What `eval` runs when the action names none."""
    include_path: tuple[Name, ...] = ()
    """Directories with task files of your own."""
    num_fewshot: NotNegative | None = None
    """None: as each task says."""
    max_new_tokens: Positive = 256
    """Bound of a generated answer, where the task sets none."""
    temperature: Temperature | None = None
    """Of generated answers, over what the tasks say; 0 is greedy."""
    top_p: Probability | None = None
    """Of generated answers, over what the tasks say."""
    batch_size: Positive = 512
    """Requests handed to the engine at a time; it schedules them itself, so results are equal."""
    use_tqdm: bool = True
    limit: Annotated[float, Field(gt=0, lt=2**31)] | None = None
    """Examples per task; below 1, the fraction of them."""
    cache_requests: bool = False
    check_integrity: bool = False
    write_out: bool = False
    log_samples: bool = False
    """Keep each example with its answer in the result file."""
    bootstrap_iters: NotNegative = 0
    """Resamplings for standard errors; 0 leaves them out."""
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
    a trainer the results are printed alone."""
    print_results: bool = True
