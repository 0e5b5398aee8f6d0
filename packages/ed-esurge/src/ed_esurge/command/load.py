"""Loading of a model and its tokenizer from a directory or a hub id, and of their engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from ed_infra.errors import ConfigError
from ed_infra.options import Options, choice
from ed_infra.package_files import get_source_name, is_package_address
from ed_infra.specs import (
    FORMAT_OF_BITS,
    KV_CACHE_FORMATS,
    QUANTIZATION_ALIASES,
    QUANTIZATION_FORMATS,
)
from pydantic import Field

from ed_esurge.command.adapter_folders import find_adapter
from ed_esurge.command.flags import Flags, format_flag
from ed_esurge.command.program import parse_words
from ed_esurge.config import EngineConfig
from ed_esurge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ed_models.protocol import LanguageModel

    from ed_esurge.engine import eSurge
    from ed_esurge.speech.engine import SpeechEngine

_DIMS = "1,1,1,-1,1"
_DTYPES = ("float32", "bfloat16", "float16")
#: Formats of packed checkpoints, which are read as they are: name -> `quant_method` in config.json.
_PACKED = {name: name for name in ("awq", "gptq", "compressed-tensors")}
#: vLLM's names of weight quantization formats that are applied during loading.
_VLLM_FORMATS = {"bitsandbytes": "nf4"}
#: Value of `--kv-cache-dtype` (vLLM's names) -> name of the format or dtype in this project.
_CACHE_DTYPES = {
    **{name: name for name in (*_DTYPES, *KV_CACHE_FORMATS)},
    "fp8_e4m3": "fp8",
}


class ModelArguments(Options):
    """A model, how it is loaded, and the options of its engine. Replicas receive this record."""

    model: str = ""
    """A directory, or a hub id."""
    tokenizer: str | None = None
    """A directory, or a hub id; default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub repository."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and computation; auto: float32 on a CPU, bfloat16 elsewhere."""
    sharding_axis_dims: str | None = Field(
        None,
        description="Devices along (dp, fsdp, ep, tp, sp); -1: the remaining devices (default: "
        f"{_DIMS}).",
    )
    tensor_parallel_size: int | None = None
    """Devices that share each layer (tp); the remaining devices are replicas (dp)."""
    quantization: str | None = Field(
        None,
        description=f"Quantize the weights while they are read: {', '.join(QUANTIZATION_FORMATS)}, "
        "or bitsandbytes (nf4); default: the codes of a GGUF file are kept (gguf; gguf_a8 also "
        "rounds activations to 8 bits), and other files are read as --dtype, as with none.",
    )
    kv_cache_dtype: Annotated[str, choice("dtype of the cache", ("auto", *_CACHE_DTYPES))] = Field(
        "auto",
        description=f"Dtype of cached keys and values: {', '.join(_CACHE_DTYPES)}, or auto, the "
        "dtype of the computation.",
    )
    config_kwargs: Mapping[str, object] = Field(default_factory=dict)
    """Further fields of the model's configuration; bits and quantization_config quantize the
    weights."""
    chat_template: str | None = None
    """A Jinja template for chats, a file or the text; default: the tokenizer's own, and without one
    chats are refused."""
    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own Python code."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Options of the engine."""
    is_one_of_several: bool = False
    """Whether these are the options of several models, and some may have no effect on this one."""


ModelFlags = Annotated[
    ModelArguments,
    Flags(
        "model",
        short={"tensor_parallel_size": ("-tp",), "quantization": ("-q",)},
        skipped=("model", "engine", "is_one_of_several"),
    ),
]
EngineFlags = Annotated[EngineConfig, Flags("engine", has_words=False)]
MODEL_HELP = (
    "A directory (of a model, a LoRA adapter or a run), a GGUF file, a hub id, or "
    "package:NAME/FILE of an installed package."
)
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def parse_model_arguments(words: Sequence[str]) -> ModelArguments:
    """Return the record of a command line: a model, and flags of the model and the engine.

    Raises:
        ConfigError: a value is invalid.
    """

    def name_flags(model: ModelPath, loading: ModelFlags, engine: EngineFlags) -> None:
        """Name the flags."""

    values = parse_words(name_flags, words)
    return values["loading"].replace(model=values["model"], engine=values["engine"])


def create_engine(arguments: ModelArguments) -> eSurge:
    """Create the engine of a model of texts. Options are validated before the model is loaded.

    Raises:
        EasyDeLError: an option is invalid, or the model cannot be loaded, or reads audio.
    """
    from ed_esurge.speech.engine import SpeechEngine

    engine = served_engine(arguments)
    if isinstance(engine, SpeechEngine):
        raise ConfigError(
            f"{arguments.model} transcribes audio, and this command needs a model of texts: use "
            "`esurge serve` and send files to /v1/audio/transcriptions"
        )
    return engine


def served_engine(arguments: ModelArguments) -> eSurge | SpeechEngine:
    """Create the engine of the arguments. The checkpoint decides between texts and speech.

    Raises:
        EasyDeLError: an option is invalid, or the model cannot be loaded.
    """
    options = arguments.engine
    rules, fields = parse_quantization(arguments)
    dims = parse_mesh_dims(arguments.sharding_axis_dims, arguments.tensor_parallel_size)
    import jax
    from ed_infra.compilation.cache import keep_compiled_programs
    from ed_infra.enums import TaskType
    from ed_models.checkpoints import hub
    from ed_models.checkpoints.checks import detect_task
    from ed_models.checkpoints.gguf.directory import find_gguf_file

    from ed_esurge.certificates import certificate_summary
    from ed_esurge.speech.engine import SPEECH_TASKS

    keep_compiled_programs()
    from ed_esurge.engine import eSurge
    from ed_esurge.model import choose_layout
    from ed_esurge.runner.drafts import DRAFT_KINDS

    dtype = arguments.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    # Load in the layout of the engine, which avoids a second copy.
    fields = {**choose_layout(jax.default_backend()), **fields}
    name = get_model_name(arguments.model)
    settings = hub.resolve(arguments.model, weights=False, revision=arguments.revision)
    adapter = find_adapter(settings)
    if adapter is not None:
        hub.resolve(arguments.model, revision=arguments.revision)  # with the weights of the adapter
        settings = adapter.resolve_base()
        arguments = arguments.replace(
            model=adapter.base,
            revision=adapter.revision,
            tokenizer=arguments.tokenizer or adapter.tokenizer,
        )
    elif settings.parent == Path(arguments.model).expanduser():  # the folder of a run
        arguments = arguments.replace(model=str(settings))
    _check_packed(arguments, settings)
    if rules is None and arguments.quantization is None and find_gguf_file(settings) is not None:
        rules = {"dtype": "gguf"}
    task = detect_task(settings)
    if task == TaskType.BASE_MODULE:  # a body without a head returns embeddings
        task = TaskType.EMBEDDING
    speculative_config = arguments.engine.speculative_config
    if speculative_config is not None:
        fields = {**DRAFT_KINDS[speculative_config.method].config_fields, **fields}
    loading: dict[str, Any] = {
        "dtype": dtype,
        "param_dtype": dtype,
        "sharding_axis_dims": dims,
        "config_kwargs": fields,
        "quantization_config": rules,
        "apply_quantization": rules is not None,
        "revision": arguments.revision,
    }
    if task in SPEECH_TASKS:
        if adapter is not None:
            raise ConfigError(
                f"{adapter.path} is the adapter of a model that transcribes audio: merge it "
                "(elarge merge BASE ADAPTER TARGET), and serve the merged model"
            )
        return _speech_engine(arguments, options, loading)
    # transformers is imported, and the tokenizer loaded, while the weights are read.
    with ThreadPoolExecutor(1) as aside:
        tokenizer = aside.submit(get_tokenizer, arguments)
        model = hub.from_pretrained(arguments.model, task=task, **loading)
    if adapter is not None:
        model = adapter.attach(model)
    if arguments.tokenizer:
        check_other_tokenizer(tokenizer.result(), model, arguments)

    def read_model(directory: Path) -> Any:
        reload_options: dict[str, Any] = {**loading, "revision": None}
        read_weights = hub.from_pretrained(str(directory), task=task, **reload_options)
        return read_weights if adapter is None else adapter.attach(read_weights)

    return eSurge(
        model,
        tokenizer.result(),
        options,
        model_name=name,
        processor=get_processor(arguments, model.input_names),
        certificate=certificate_summary(settings),
        read_model=read_model,
        directory=settings,
    )


#: Flags of the model without an effect on a model for speech.
_TEXT_FLAGS = ("tokenizer", "chat_template", "trust_remote_code")


def _speech_engine(
    arguments: ModelArguments, options: EngineConfig, loading: dict[str, Any]
) -> SpeechEngine:
    """Load a model that transcribes audio.

    Raises:
        ConfigError: an option has no effect on the model. With `--also`, the options are those of
            all models, so they are not checked.
    """
    from ed_models.speech import load_transcriber

    from ed_esurge.speech.engine import SpeechEngine, unused_options

    if not arguments.is_one_of_several:
        flags = [name for name in _TEXT_FLAGS if getattr(arguments, name)]
        for name in [*unused_options(options), *flags]:
            raise ConfigError(
                f"{format_flag(name)} has no effect on {arguments.model}, which transcribes "
                "audio: omit the option"
            )
    engine = SpeechEngine(
        load_transcriber(arguments.model, **loading), get_model_name(arguments.model)
    )
    if options.compile_runner:
        engine.warm_up()
    return engine


def parse_quantization(arguments: ModelArguments) -> tuple[Any, dict[str, Any]]:
    """Return the quantization format of the weights, and the other fields of the configuration.

    Raises:
        ConfigError: A format is unknown, or two arguments set a format.
    """
    from ed_infra.config.fields import canonical_field, normalize_fields

    fields = {canonical_field(name): value for name, value in arguments.config_kwargs.items()}
    bits = normalize_fields("bits", fields.pop("bits", None))
    rules = {
        "--quantization": _resolve_format(arguments.quantization),
        "quantization_config of --config-kwargs": normalize_fields(
            "quantization_config", fields.pop("quantization_config", None)
        ),
        "bits of --config-kwargs": None if bits is None else FORMAT_OF_BITS[bits],
    }
    named = {source: rule for source, rule in rules.items() if rule is not None}
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} both quantize the weights: keep one of them")
    rule = next(iter(named.values()), None)
    if isinstance(rule, dict):
        raise ConfigError(
            f"quantization_config of --config-kwargs has quant_method={rule['quant_method']!r}, "
            "which describes the files of a packed checkpoint; such a checkpoint is read as it is. "
            'To quantize while loading, give {"dtype": "nf4"} or --quantization nf4'
        )
    cache = _cache_fields(arguments)
    for name in fields.keys() & cache.keys():
        raise ConfigError(f"--kv-cache-dtype and {name} of --config-kwargs: keep one of them")
    return ({"dtype": rule} if isinstance(rule, str) else rule), fields | cache


def _resolve_format(name: str | None) -> str | None:
    if name in (None, "none", *_PACKED):
        return None
    format_name = QUANTIZATION_ALIASES.get(name, _VLLM_FORMATS.get(name, name))
    if format_name not in QUANTIZATION_FORMATS:
        raise ConfigError(
            f"--quantization {name} is no format to quantize weights to: take one of "
            f"{', '.join(QUANTIZATION_FORMATS)}. A checkpoint that is packed already (AWQ, GPTQ, "
            "bitsandbytes, compressed-tensors, FP8) is read as it is: leave --quantization out"
        )
    return format_name


def _check_packed(arguments: ModelArguments, directory: Path) -> None:
    """Check that a checkpoint is packed as `--quantization awq` says.

    Raises:
        ConfigError: the checkpoint has another format, or none.
    """
    expected = _PACKED.get(arguments.quantization or "")
    if expected is None:
        return
    from ed_models.checkpoints.checks import read_checkpoint_settings

    config = read_checkpoint_settings(directory / "config.json")
    stored = (config.get("quantization_config") or {}).get("quant_method")
    if stored != expected:
        raise ConfigError(
            f"--quantization {arguments.quantization} names the format of a packed checkpoint, and "
            f"config.json of {arguments.model} has quant_method={stored!r}: leave --quantization "
            f"out, or take one of {', '.join(QUANTIZATION_FORMATS)}"
        )


def _cache_fields(arguments: ModelArguments) -> dict[str, Any]:
    """Return the fields of the configuration that `--kv-cache-dtype` sets."""
    name = _CACHE_DTYPES.get(arguments.kv_cache_dtype)
    if name is None:
        return {}
    if name in KV_CACHE_FORMATS:
        return {"kv_cache_quantization_config": {"dtype": name}}
    return {"kvdtype": name}


def get_tokenizer(arguments: ModelArguments) -> Any:
    """Load the tokenizer of the arguments.

    Raises:
        CheckpointError: The tokenizer is missing.
        ConfigError: The chat template cannot be read.
    """
    from ed_models.checkpoints.tokenizers import load_tokenizer

    return load_tokenizer(
        arguments.tokenizer or arguments.model,
        revision=None if arguments.tokenizer else arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        chat_template=arguments.chat_template,
    )


def check_other_tokenizer(
    tokenizer: Tokenizer, model: LanguageModel, arguments: ModelArguments
) -> None:
    """Check that the model has a row for each id of `--tokenizer`.

    Raises:
        ConfigError: an id has no row.
    """
    from ed_esurge.model import get_vocab_size

    largest, rows = max(tokenizer.get_vocab().values(), default=-1), get_vocab_size(model)
    if largest >= rows:
        raise ConfigError(
            f"--tokenizer {arguments.tokenizer} has ids up to {largest}, and {arguments.model} has "
            f"{rows} rows of embeddings (ids 0 to {rows - 1}): use the tokenizer of the model, or "
            "add rows in training (model: {resize_token_embeddings: true} in a run file) and serve "
            "the saved model"
        )


def get_processor(arguments: ModelArguments, input_names: Sequence[str]) -> Any:
    """Load the processor of a model that reads images or audio; None for other models.

    Args:
        input_names: names of the arrays that the model accepts.

    Raises:
        CheckpointError: the processor is missing.
    """
    from ed_models.checkpoints.tokenizers import load_feature_extractor, load_processor

    if "pixel_values" in input_names:
        return load_processor(
            arguments.model,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        )
    if "input_features" in input_names:
        return load_feature_extractor(arguments.model, revision=arguments.revision)
    return None


def get_model_name(model: str) -> str:
    """Return the name of the model for clients: the hub id, or the last part of a path."""
    if is_package_address(model):
        return get_source_name(model)
    path = Path(model).expanduser()
    return get_source_name(str(path.resolve())) if path.exists() else model


def check_model_names(names: Sequence[str]) -> None:
    """Raise `ConfigError` if two models of one server have the same name."""
    if len(set(names)) < len(names):
        raise ConfigError(f"two models have the same name ({', '.join(names)}): rename a directory")


def parse_mesh_dims(text: str | None, tensor_parallel_size: int | None = None) -> tuple[int, ...]:
    """Return the number of devices along each axis of the mesh.

    Args:
        text: The numbers, with commas; None: `tensor_parallel_size`, or the default.
        tensor_parallel_size: Devices along `tp`; the remaining devices are along `dp`.

    Raises:
        ConfigError: the text is not a list of integers, both arguments are given, or the size is
            not positive.
    """
    if tensor_parallel_size is not None:
        if text is not None:
            raise ConfigError(
                "--tensor-parallel-size and --sharding-axis-dims both set the mesh: keep one"
            )
        if tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size {tensor_parallel_size} must be at least 1")
        return (-1, 1, 1, tensor_parallel_size, 1)
    text = text or _DIMS
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--sharding-axis-dims is numbers with commas between, such as {_DIMS}, not {text!r}"
        ) from None
