"""A GGUF file as a directory in Hugging Face layout.

The directory contains config.json and the files of the tokenizer, written from the metadata. The
weights stay in the GGUF file: `find_gguf_file` returns it. So everything that reads a checkpoint
reads a GGUF file too. The directories of a process are temporary.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.files import read_parts
from ed_models.checkpoints.gguf.settings import TOKEN_ID_KEYS, build_settings
from ed_models.checkpoints.gguf.vocabulary import write_tokenizer

ENDING = ".gguf"
_directories: dict[tuple[Path, int, int, Hashable], Path] = {}
_weights: dict[Path, Path] = {}


def find_gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file with the weights of a directory; None if it is another one."""
    file = find_weights_file(directory)
    return file if file is not None and file.suffix == ENDING else None


def find_weights_file(directory: Path) -> Path | None:
    """Return the file that `write_settings_folder` wrote a directory for; None for others."""
    return _weights.get(directory)


def as_directory(file: Path) -> Path:
    """Return a directory with the settings and the tokenizer of a GGUF file.

    The directory is deleted at the end of the process. A file that has not changed has one.

    Raises:
        CheckpointError: the file is damaged, or its architecture is not supported.
    """

    def write_files(directory: Path) -> None:
        header = read_parts(file)
        settings = build_settings(header)
        write_settings_json(directory / "config.json", settings)
        ends = {name: settings[name] for name in TOKEN_ID_KEYS if name in settings}
        write_settings_json(directory / "generation_config.json", ends)
        write_tokenizer(directory, header.metadata)

    return write_settings_folder(file, write_files)


def read_gguf_config(file: Path) -> dict[str, Any]:
    """Return config.json of the model in a GGUF file, without jax.

    Raises:
        CheckpointError: the file is damaged, or its architecture is not supported.
    """
    status = file.stat()
    return {**_read_config(file.absolute(), status.st_mtime_ns, status.st_size)}


@lru_cache(8)
def _read_config(file: Path, changed: int, size: int) -> dict[str, Any]:
    """Return the configuration of a file; the time of the change and the size identify it."""
    try:
        return build_settings(read_parts(file))
    except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: the metadata is damaged ({error!r})") from error


def write_settings_folder(
    file: Path, write_files: Callable[[Path], None], version: Hashable = None
) -> Path:
    """Return a temporary directory in Hugging Face layout for a file with weights.

    Args:
        file: the file; `find_weights_file` returns it for the directory.
        write_files: writes the settings and the tokenizer into the directory.
        version: identifies the settings, if they are not in the file.

    Raises:
        CheckpointError: the settings in the file are damaged.
    """
    file = file.absolute()
    status = file.stat()
    key = file, status.st_mtime_ns, status.st_size, version
    if key not in _directories:
        directory = Path(tempfile.mkdtemp(prefix=f"{file.stem[:64]}-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        try:
            write_files(directory)
        except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{file}: the metadata is damaged ({error!r}): download or convert the model again"
            ) from error
        _directories[key], _weights[directory] = directory, file
    return _directories[key]


def file_in(directory: Path, name: str | None = None) -> Path | None:
    """Return the GGUF file of a directory; None for a checkpoint in Hugging Face layout.

    Args:
        directory: an existing directory.
        name: the file to use; None selects the only one of a directory without config.json.

    Raises:
        CheckpointError: there is no such file, or there are several.
    """
    if name is not None:
        file = directory / name
        if not file.is_file() or Path(name).is_absolute() or ".." in Path(name).parts:
            there = ", ".join(sorted(p.name for p in directory.glob(f"*{ENDING}"))) or "none"
            raise CheckpointError(f"{directory} has no file {name!r} (GGUF files: {there})")
        return file
    if (directory / "config.json").is_file():
        return None
    files = sorted(directory.glob(f"*{ENDING}"))
    models = [file for file in files if not file.name.startswith("mmproj")]
    firsts = [file for file in models if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(firsts) > 1:
        raise CheckpointError(
            f"{directory} has several GGUF files: {', '.join(file.name for file in firsts)}; "
            "select one with gguf_file="
        )
    return firsts[0] if firsts else None


def parts_pattern(name: str) -> str:
    """Return a pattern that matches a GGUF file, and the other parts of a split model."""
    return re.sub(r"-\d{5}-of-", "-?????-of-", name)


def write_settings_json(path: Path, content: object) -> None:
    """Write a file of settings; numbers may be infinite."""
    path.write_text(json.dumps(content, indent=2, allow_nan=True), encoding="utf-8")
