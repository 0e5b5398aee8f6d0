"""Addresses of EasyLM's checkpoints (`params::FILE`), and the models that the files contain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError, unknown_name

if TYPE_CHECKING:
    from jax.typing import DTypeLike

#: Kind of an address -> what its file contains.
_KINDS = {
    "params": "a stream of parameters",
    "trainstate": "a stream of a whole training state",
    "trainstate_params": "the parameters of a stream of a whole training state",
    "flax_params": "one msgpack object of flax with the parameters",
}


def parse_address(text: str) -> tuple[str, str]:
    """Split `KIND::PATH`; a path without a kind has the kind `params`.

    Raises:
        ConfigError: The kind is unknown.
    """
    kind, mark, path = text.partition("::")
    if not mark:
        return "params", text
    if kind not in _KINDS:
        raise unknown_name("kind of checkpoint", kind, _KINDS)
    return kind, path


def convert_to_model(
    kind: str, source: Path, target: Path, config: str | Path | None = None
) -> Path | None:
    """Write the model of a file, or of a checkpoint of a run, in Hugging Face layout.

    Args:
        kind: A key of `_KINDS`.
        source: A stream, a file of flax, or a checkpoint of a run.
        target: The directory to write.
        config: For a file: the directory with the model's `config.json`. None: the folder of the
            file.

    Returns:
        The directory with the tokenizer, if there is one.

    Raises:
        ConfigError: The address names the state of an optimizer, which is not read.
        CheckpointError: The file is damaged, or contains another model.
    """
    from ed_trainers.convert import convert, find_tokenizer

    if kind == "trainstate":
        raise ConfigError(
            f"trainstate::{source}: the optimizer's state of EasyLM is not read; write "
            f"trainstate_params::{source} for the parameters of this file"
        )
    if source.is_dir():
        convert(source, target)
        return find_tokenizer(source)
    settings = config or source.parent
    convert(source, target, config=settings)
    return Path(settings)


def write_config(folder: Path, fields: Mapping[str, Any]) -> Path:
    """Write a `config.json` into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(fields), indent=2), "utf-8")
    return folder


def float_dtype(name: str) -> Any:
    """Return the dtype of `bf16`, `fp16`, `fp32`, `fp64`; None for an empty name.

    Raises:
        ConfigError: The name is unknown.
    """
    import jax.numpy as jnp

    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    if not name:
        return None
    if name not in names:
        raise unknown_name("dtype", name, names)
    return jnp.dtype(names[name])


def cast(array: np.ndarray, dtype: DTypeLike | None) -> np.ndarray:
    """Return an array of numbers in another dtype; integers and None leave it unchanged."""
    import jax.numpy as jnp

    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(dtype)


def read_parameters(address: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the parameters of a file by EasyLM's names.

    Raises:
        CheckpointError: The file does not exist, or is damaged.
    """
    from ed_trainers.easylm import get_parameter_names, open_arrays

    _, path = parse_address(address)
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is not a file: pass params::FILE")
    arrays = open_arrays(path)
    for name, stored in get_parameter_names(arrays).items():
        yield name, arrays.read(stored)


def write_parameters(
    path: str | Path, arrays: Iterable[tuple[str, np.ndarray]], *, streaming: bool, dtype: str
) -> Path:
    """Write parameters as a stream, or as one object of flax's msgpack."""
    from ed_trainers.easylm import write_stream, write_tree

    target = float_dtype(dtype)
    write = write_stream if streaming else write_tree
    return write(path, ((name, cast(array, target)) for name, array in arrays))


def cast_file(path: Path, dtype: str, *, streaming: bool = True) -> None:
    """Rewrite a file of parameters in another dtype."""
    write_parameters(path, read_parameters(str(path)), streaming=streaming, dtype=dtype)
