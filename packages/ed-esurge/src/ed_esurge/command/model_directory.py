"""The directory of models of `esurge serve`: `--model-dir`, `--model-memory`, `--keep-alive`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError

from ed_esurge.command.flags import build_options
from ed_esurge.command.load import parse_quantization, served_engine
from ed_esurge.config import EngineConfig

if TYPE_CHECKING:
    from ed_esurge.server.library.checkpoint_files import CheckpointFiles
    from ed_esurge.server.library.loading import ModelLoading

GIB = 2**30
#: Bytes of a weight in a format of quantization, with its scales.
_BYTES = {"int8": 1.1, "fp8": 1.1, "w8a8": 1.1, "mxfp8": 1.1}
_FOUR_BITS = 0.6
#: Default of `max_num_seqs` on a CPU.
_CPU_SEQUENCES = 16


def model_directory(values: argparse.Namespace) -> ModelLoading | None:
    """Return the options of the directory of models; None without `--model-dir`.

    Raises:
        ConfigError: the directory does not exist, or an option is invalid.
    """
    if values.model_dir is None:
        if values.model_memory is not None:
            raise ConfigError("--model-memory requires --model-dir")
        return None
    from ed_esurge.server.library.loading import ModelLoading
    from ed_esurge.server.ollama.keep_alive import parse_duration

    folder = Path(values.model_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--model-dir {values.model_dir} is no directory: create it")
    if values.model_memory is not None and values.model_memory <= 0:
        raise ConfigError(f"--model-memory {values.model_memory} must be positive")
    try:
        keep_alive: Any = parse_duration(values.keep_alive)
    except ValueError as error:
        raise ConfigError(f"--keep-alive: {error}") from None
    overrides = {"also": [], "tokenizer": None, "revision": None}

    def load(path: Path) -> Any:
        return served_engine(
            argparse.Namespace(**{**vars(values), **overrides, "model": str(path)})
        )

    memory = None if values.model_memory is None else int(values.model_memory * GIB)
    return ModelLoading(
        folder,
        load,
        lambda files: estimate(values, files),
        memory,
        float(keep_alive),
        build_options(values, EngineConfig).max_model_len,
    )


def estimate(values: argparse.Namespace, files: CheckpointFiles) -> int:
    """Return the bytes of weights and pages that a model will need, before loading."""
    import jax

    on_cpu = jax.default_backend() == "cpu"
    options = build_options(values, EngineConfig)
    width = {"auto": 4 if on_cpu else 2, "float32": 4}.get(values.dtype, 2)
    rules, _ = parse_quantization(values)
    name = rules.get("dtype") if isinstance(rules, dict) else None
    per_weight = width if name is None else _BYTES.get(name, _FOUR_BITS)
    longest = files.text_field("max_position_embeddings", "n_positions")
    length = min(options.max_model_len, longest or options.max_model_len)
    is_explicit = "max_num_seqs" in options.model_fields_set
    sequences = options.max_num_seqs if is_explicit or not on_cpu else _CPU_SEQUENCES
    pages = files.page_bytes(length * sequences, width)
    if on_cpu:
        pages = min(pages, int(options.cpu_cache_gib * GIB))
    return int(files.parameters * per_weight) + pages
