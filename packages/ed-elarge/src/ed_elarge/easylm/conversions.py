"""EasyLM's commands for files: to and from Hugging Face's layout, other formats, differences."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError

from ed_elarge.easylm import checkpoints, llama
from ed_elarge.easylm.flags import FlagValues, need


def from_hugging_face(flags: FlagValues) -> None:
    """Write a model in Hugging Face layout as a file of EasyLM."""
    from ed_trainers.easylm import to_easylm

    source = flags["checkpoint_dir"] or flags["hf_model"]
    if not source:
        need(flags, "checkpoint_dir")
    need(flags, "output_file")
    stream = to_easylm(source, flags["output_file"])
    if flags["float_dtype"] or not flags["streaming"]:
        checkpoints.cast_file(stream, flags["float_dtype"], streaming=flags["streaming"])
    print(f"wrote {stream}")


def to_hugging_face(flags: FlagValues) -> None:
    """Write a file of EasyLM as a model in Hugging Face layout, with its tokenizer.

    Raises:
        ConfigError: The folder of the tokenizer contains no tokenizer.
    """
    need(flags, "load_checkpoint", "output_dir")
    kind, path = checkpoints.parse_address(flags["load_checkpoint"])
    source, target = Path(path), Path(flags["output_dir"])
    if not source.is_file():
        raise CheckpointError(f"{path} is not a file: pass params::FILE")
    with tempfile.TemporaryDirectory(prefix="easylm-") as folder:
        cast = Path(folder) / "params"
        checkpoints.write_parameters(
            cast,
            checkpoints.read_parameters(f"{kind}::{path}"),
            streaming=True,
            dtype=flags["dtype"],
        )
        config = source.parent
        if "load_llama_config" in flags.explicit_names or not (config / "config.json").is_file():
            flags["load_llama_config"] = flags["load_llama_config"] or flags["model_size"]
            fields = llama.read_fields(flags) or {}
            config = checkpoints.write_config(Path(folder), llama.get_llama_fields(fields))
        checkpoints.convert_to_model("params", cast, target, config)
    tokenizer = flags["tokenizer_path"] or flags["tokenizer"]
    if tokenizer:
        copy_tokenizer(Path(tokenizer), target)
    print(f"wrote {target}")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer, the file `tokenizer.model` or a folder, into the folder of a model.

    Raises:
        ConfigError: There is no tokenizer.
    """
    names = (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
    )
    files = [source] if source.is_file() else [source / name for name in names]
    present = [file for file in files if file.is_file()]
    if not present:
        raise ConfigError(
            f"{source} contains no tokenizer: pass tokenizer.model, or a folder with tokenizer.json"
        )
    for file in present:
        shutil.copyfile(file, target / file.name)


def convert_file(flags: FlagValues) -> None:
    """Write the parameters of a file in another format and dtype."""
    need(flags, "load_checkpoint", "output_file")
    _check_dtype(flags)
    arrays = checkpoints.read_parameters(flags["load_checkpoint"])
    print(f"wrote {_write(flags, arrays)}")


def write_difference(flags: FlagValues) -> None:
    """Write target minus base; with `recover_diff`, write base plus target."""
    need(flags, "load_base_checkpoint", "load_target_checkpoint", "output_file")
    _check_dtype(flags)
    base, target = (flags[f"load_{side}_checkpoint"] for side in ("base", "target"))
    sign = 1 if flags["recover_diff"] else -1
    print(f"wrote {_write(flags, _combine(base, target, sign))}")


def _combine(base: str, target: str, sign: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield `target + sign * base` for each parameter.

    Raises:
        CheckpointError: The files have other parameters, or other shapes.
    """
    from ed_trainers.easylm import get_parameter_names, open_arrays

    arrays = open_arrays(checkpoints.parse_address(base)[1])
    names = get_parameter_names(arrays)
    remaining_names = set(names)
    for name, value in checkpoints.read_parameters(target):
        if name not in names:
            raise CheckpointError(f"{base} has no {name}, but {target} has it")
        remaining_names.discard(name)
        subtrahend = arrays.read(names[name])
        if subtrahend.shape != value.shape:
            shapes = f"{list(subtrahend.shape)} in {base} and {list(value.shape)} in {target}"
            raise CheckpointError(f"{name} has the shapes {shapes}")
        yield name, value.astype(np.float32) + sign * subtrahend.astype(np.float32)
    if remaining_names:
        raise CheckpointError(f"{target} has no {min(remaining_names)}, but {base} has it")


def _check_dtype(flags: FlagValues) -> None:
    checkpoints.float_dtype(flags["float_dtype"])


def _write(flags: FlagValues, arrays: Iterator[tuple[str, np.ndarray]]) -> Path:
    return checkpoints.write_parameters(
        flags["output_file"], arrays, streaming=flags["streaming"], dtype=flags["float_dtype"]
    )
