"""The directory of models of `esurge serve`: `--model-dir`, `--model-memory`, `--keep-alive`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError

from ed_esurge.command.load import ModelArguments, parse_quantization, served_engine
from ed_esurge.config import EngineConfig
from ed_esurge.server.activity import parse_keep_alive
from ed_esurge.server.options import ModelSource, ServerOptions

if TYPE_CHECKING:
    from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles

_GIB = 2**30
#: Bytes of a weight in a format of quantization, with its scales.
_BYTES = {"int8": 1.1, "fp8": 1.1, "w8a8": 1.1, "mxfp8": 1.1}
_FOUR_BITS = 0.6
#: Default of `max_num_seqs` on a CPU.
_CPU_SEQUENCES = 16


def model_directory(arguments: ModelArguments, options: ServerOptions) -> ModelSource | None:
    """Return the options of the directory of models; None without `--model-dir`.

    Raises:
        ConfigError: the directory does not exist, or an option is invalid.
    """
    plain = arguments.replace(tokenizer=None, revision=None)

    def load(path: Path) -> Any:
        return served_engine(plain.replace(model=str(path)))

    return build_loading(options, arguments.engine, load, lambda files: estimate(arguments, files))


def build_loading(
    options: ServerOptions,
    engine: EngineConfig,
    load: Callable[[Path], Any],
    estimate: Callable[[CheckpointFiles], int],
) -> ModelSource | None:
    """Return how the models of `model_directory` are loaded; None without the option.

    Args:
        engine: options of the engine of each model.
        load, estimate: see `ModelLoading`.

    Raises:
        ConfigError: the directory does not exist.
    """
    directory = options.model_directory
    if directory is None or isinstance(directory, ModelSource):
        return directory
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--model-dir (model_directory) {directory} is no directory: create it")
    from ed_esurge.frontends.library.loading import ModelLoading

    memory = None if options.model_memory is None else int(options.model_memory * _GIB)
    seconds = float(str(parse_keep_alive(options.keep_alive)))
    return ModelLoading(folder, load, estimate, memory, seconds, engine.max_model_len)


def estimate(arguments: ModelArguments, files: CheckpointFiles) -> int:
    """Return the bytes of weights and pages that a model will need, before loading."""
    import jax

    width = {"auto": 4 if jax.default_backend() == "cpu" else 2, "float32": 4}.get(
        arguments.dtype, 2
    )
    rules, _ = parse_quantization(arguments)
    name = rules.get("dtype") if isinstance(rules, dict) else None
    return estimate_memory(arguments.engine, files, width, name)


def estimate_memory(
    options: EngineConfig, files: CheckpointFiles, width: int, quantization: str | None
) -> int:
    """Return the bytes of weights and pages that a model will need.

    Args:
        width: bytes of a number of the cache, and of a weight without quantization.
        quantization: format of the weights.
    """
    import jax

    on_cpu = jax.default_backend() == "cpu"
    per_weight = width if quantization is None else _BYTES.get(quantization, _FOUR_BITS)
    longest = files.read_size("max_position_embeddings", "n_positions")
    length = min(options.max_model_len, longest or options.max_model_len)
    is_explicit = "max_num_seqs" in options.model_fields_set
    sequences = options.max_num_seqs if is_explicit or not on_cpu else _CPU_SEQUENCES
    pages = files.page_bytes(length * sequences, width)
    if on_cpu:
        pages = min(pages, int(options.cpu_cache_gib * _GIB))
    return int(files.parameters * per_weight) + pages
