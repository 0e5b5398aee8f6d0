"""The sections of a run file. Sections that describe another package are that package's own class.

Nothing here imports jax or transformers: dtypes, meshes and mechanisms are words until a model is
built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import ConfigError
from ed_infra.options import Options, choice, dtype_name
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class TokenizerTraining(Options):
    """Train a byte-level BPE tokenizer on the training texts of the mixture."""

    vocab_size: Annotated[int, Field(ge=259)]
    """Tokens; at least the 256 bytes and the three special ones."""
    min_frequency: Positive = 2
    """Pairs seen less often are not merged."""


class TrainedTokenizer(Options):
    """`tokenizer: {train: {...}}`: this run makes its own tokenizer."""

    train: TokenizerTraining


def _tokenizer_kind(value: Any) -> str:
    return "train" if isinstance(value, (Mapping, TrainedTokenizer)) else "path"


Tokenizer = Annotated[
    Annotated[str, Tag("path")] | Annotated[TrainedTokenizer, Tag("train")],
    Discriminator(_tokenizer_kind),
]


def _task(value: Any) -> Any:
    try:
        return canonical_task(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class LoadingExtras(Options):
    """`model.extra_kwargs`: arguments of loading that have no key of their own."""

    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own Python code."""
    revision: str | None = None
    """Branch, tag or commit of a hub repository."""


class ModelSection(Options):
    """Which model: an existing one, or a configuration to train from scratch."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "pretrained_model_name_or_path": "name_or_path",
        "path": "name_or_path",
    }

    name_or_path: str | None = None
    """A directory in Hugging Face layout, or a hub id."""
    config: dict[str, Any] | None = None
    """A model configuration (`model_type` and its keys): the weights start random."""
    tokenizer: Tokenizer | None = None
    """A directory, a hub id, or `{train: {vocab_size: N}}`. None: the model's own."""
    task: Annotated[TaskType, BeforeValidator(_task)] = TaskType.CAUSAL_LM
    extra_kwargs: LoadingExtras = LoadingExtras()

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.name_or_path is None) == (self.config is None):
            raise ValueError(
                "give either name_or_path (an existing model) or config (a new one, trained from "
                "scratch), and not both"
            )
        if self.config is not None and self.tokenizer is None:
            raise ValueError(
                "a model that is built from a config has no tokenizer of its own: give "
                "tokenizer: PATH or tokenizer: {train: {vocab_size: N}}"
            )
        return self


class LoaderSection(Options):
    """How the weights are held and computed with."""

    dtype: Annotated[str, dtype_name] = "float32"
    """Computation dtype."""
    param_dtype: Annotated[str, dtype_name] = "float32"
    """Storage dtype of the parameters."""
    precision: Annotated[str | None, choice("precision", ("default", "high", "highest"))] = None
    """Precision of float32 matrix products on accelerators; None is jax's own default."""
    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own Python code."""
    verbose: bool = False
    """Print the model's parameters with their shapes and shardings once it is built."""


class ShardingSection(Options):
    """The device mesh and what is laid over it; becomes fields of the model's config."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "sharding_axis_dims": "axis_dims",
        "sharding_axis_names": "axis_names",
        "sharding_dcn_axis_dims": "dcn_axis_dims",
    }

    axis_dims: tuple[int, ...] = (1, -1, 1, 1, 1)
    """Devices along each axis; one -1 takes what remains."""
    axis_names: tuple[str, ...] = ("dp", "fsdp", "ep", "tp", "sp")
    dcn_axis_dims: tuple[int, ...] | None = None
    """Slices or hosts along each axis, for meshes that span a data-centre network."""
    auto_shard_model: bool = True
    """False: parameters are replicated instead of sharded."""
    use_ring_of_experts: bool | None = None
    fsdp_is_ep_bound: bool | None = None
    sp_is_ep_bound: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> ShardingSection:
        for key in ("axis_dims", "dcn_axis_dims"):
            dims = getattr(self, key)
            if dims is None:
                continue
            if len(dims) != len(self.axis_names):
                raise ValueError(
                    f"{key} has {len(dims)} entries {list(dims)}, but there are "
                    f"{len(self.axis_names)} axes {list(self.axis_names)}"
                )
            if any(dim < 1 and dim != -1 for dim in dims):
                raise ValueError(f"{key} {list(dims)}: each entry must be positive, or -1")
            if list(dims).count(-1) > 1:
                raise ValueError(f"{key} {list(dims)}: only one entry may be -1")
        return self


class PlatformSection(Options):
    """Where and by which kernels the model runs."""

    backend: Annotated[str | None, choice("backend", ("cpu", "gpu", "tpu"))] = None
    platform: Annotated[str | None, choice("platform", ("jax", "triton", "pallas"))] = None


class BaseConfigSection(Options):
    """Overrides of the model's configuration: execution fields and architecture keys alike."""

    values: dict[str, Any] = Field(default_factory=dict)
    operation_configs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Mechanism -> its block sizes."""


class EvalSection(Options):
    """How lm-evaluation-harness is run. Its own names; each is passed on or acted on."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "fewshot": "num_fewshot",
        "max_gen_toks": "max_new_tokens",
    }

    tasks: tuple[str, ...] = ()
    """What `eval` runs when the action names none."""
    include_path: tuple[str, ...] = ()
    """Directories with task files of your own."""
    num_fewshot: NotNegative | None = None
    """None: as each task says."""
    max_new_tokens: Positive = 256
    """Bound of a generated answer, where the task sets none."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Of generated answers, over what the tasks say; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of generated answers, over what the tasks say."""
    batch_size: Positive = 512
    """Requests handed to the engine at a time; it schedules them itself, so results are equal."""
    use_tqdm: bool = True
    limit: Annotated[float, Field(gt=0)] | None = None
    """Examples per task; below 1, the fraction of them."""
    cache_requests: bool = False
    check_integrity: bool = False
    write_out: bool = False
    log_samples: bool = False
    """Keep each example with its answer in the result file."""
    bootstrap_iters: NotNegative = 0
    """Resamplings for standard errors; 0 leaves them out."""
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = False
    gen_kwargs: dict[str, Any] | None = None
    predict_only: bool = False
    random_seed: int = 0
    numpy_random_seed: int = 1234
    fewshot_random_seed: int = 1234
    output_path: str | None = None
    """JSON file for the results; None: `eval/results.json` in the run's directory."""
    print_results: bool = True


def _mixture() -> type:
    from ed_data.config import Mixture

    return Mixture


def _engine() -> type:
    from ed_esurge.config import EngineConfig

    return EngineConfig


#: Section -> the class that checks it. `trainer` is not here: its class depends on `trainer_type`.
SECTIONS: dict[str, Callable[[], type]] = {
    "model": lambda: ModelSection,
    "loader": lambda: LoaderSection,
    "sharding": lambda: ShardingSection,
    "platform": lambda: PlatformSection,
    "base_config": lambda: BaseConfigSection,
    "mixture": _mixture,
    "esurge": _engine,
    "eval": lambda: EvalSection,
}

#: Sections of the guide that this version does not have; named, so that the error can say so.
LATER: frozenset[str] = frozenset(
    {"quantization", "lora", "teacher_model", "reference_model", "reward_model"}
)
