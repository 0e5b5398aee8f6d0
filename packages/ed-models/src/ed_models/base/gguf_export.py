"""Write a module as a GGUF file."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ed_infra.errors import CheckpointError, ConfigError
from ed_layers.quantization.model import is_quantized
from flax import nnx

from ed_models.adapters.lora import has_lora
from ed_models.checkpoints import hub
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.gguf.table import row_of_model
from ed_models.checkpoints.gguf.vocabulary_writer import NO_TOKENIZER, tokenizer_metadata
from ed_models.checkpoints.gguf.writer import file_type, write_file
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.saving import TokenizerFiles, layer_values

_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def save_gguf(
    model: Any,
    path: str | Path,
    *,
    tokenizer: TokenizerFiles | str | Path | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> Path:
    """Write a model as a GGUF file for llama.cpp.

    Weights are copied from the devices one tensor at a time.

    Args:
        model: a module without adapters and quantized matrices.
        path: the file; one that exists is replaced.
        tokenizer: the tokenizer, or a directory with its files. None writes a file without a
            tokenizer, for which llama.cpp accepts only token ids.
        dtype: format of the matrices: "f32", "f16", "bf16", "q8_0" or "q4_0"; None is the dtype of
            the parameters.
        name: `general.name`; None is the name of the file.

    Returns:
        the path of the file.

    Raises:
        CheckpointError: llama.cpp has no such model.
        ConfigError: the model has adapters or quantized matrices, or the format is unknown.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: pass the name of a file, such as model.gguf")
    if has_lora(model):
        raise ConfigError(
            "the model has adapters: merge them first (unwrap_lora_to_layers), then write it"
        )
    if is_quantized(model):
        raise ConfigError(
            "the model has quantized matrices: call dequantize first; dtype='q8_0' and 'q4_0' "
            "quantize as llama.cpp does"
        )
    if jax.process_count() > 1:
        raise ConfigError(
            "a GGUF file is written by one process: call save_pretrained in all processes, and "
            "convert the directory with `elarge convert`"
        )
    row = row_of_model(model.config)
    state = nnx.state(model)
    shapes = weight_map(type(model), state, model.config).shapes
    if dtype is None:
        dtype = _OF_DTYPE.get(np.dtype(model.param_dtype).name, "f32")
    elif dtype.lower() in _OF_DTYPE:
        dtype = _OF_DTYPE[dtype.lower()]
    write_file(
        path,
        row,
        model.config,
        shapes,
        layer_values(state),
        dtype=dtype,
        name=name or path.stem,
        tokenizer=_metadata(tokenizer, model.config.vocab_size),
    )
    return path


def to_gguf(source: str | Path, path: str | Path, *, dtype: str | None = None) -> Path:
    """Write the model of a directory or a hub repository as a GGUF file.

    The whole model is in memory, in the dtype of its files.

    Args:
        source: the directory or repository.
        path, dtype: see `save_gguf`.

    Raises:
        CheckpointError: the model cannot be loaded, or llama.cpp has no such model.
    """
    if dtype is not None:
        file_type(_OF_DTYPE.get(dtype, dtype))  # before the model is loaded
    directory = hub.resolve(source)
    stored = _stored_dtype(directory)
    model = hub.from_pretrained(
        directory, task=detect_task(directory), dtype=stored, param_dtype=stored
    )
    return save_gguf(model, path, tokenizer=directory, dtype=dtype, name=Path(source).name)


def from_gguf(source: str | Path, target: str | Path, *, dtype: str | None = None) -> Path:
    """Write the model of a GGUF file, and its tokenizer, in Hugging Face layout.

    Args:
        source: the file, or a file in a hub repository.
        target: the directory.
        dtype: of the parameters; None is float32 for a float32 file and bfloat16 for others.

    Raises:
        CheckpointError: the file is damaged, or the directory is not empty.
    """
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty: choose a new directory")
    directory = hub.resolve(source)
    dtype = dtype or _stored_dtype(directory)
    model = hub.from_pretrained(
        directory, task=detect_task(directory), dtype=dtype, param_dtype=dtype
    )
    model.save_pretrained(target)
    for pattern in ("tokenizer*.json", "*.jinja"):
        for file in directory.glob(pattern):
            shutil.copyfile(file, target / file.name)
    return target


def _stored_dtype(directory: Path) -> str:
    stored = getattr(hub.read_config(directory), "dtype", None) or "float32"
    return str(stored).removeprefix("torch.")


def _metadata(tokenizer: TokenizerFiles | str | Path | None, vocab_size: int) -> dict[str, Any]:
    if tokenizer is None:
        return dict(NO_TOKENIZER)
    if isinstance(tokenizer, str | Path):
        return tokenizer_metadata(Path(tokenizer), vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(Path(folder))
        return tokenizer_metadata(Path(folder), vocab_size)
