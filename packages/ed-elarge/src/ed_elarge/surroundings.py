"""Does a run fit this machine, as far as a look at names tells: files, folders, ports.

`normalize` reads a file alike everywhere; what is here depends on where. It costs milliseconds and
imports neither jax nor transformers: `--dry-run`, `validate` and every run begin with it.
"""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ed_data.config import FILE_TYPES
from ed_infra.errors import unknown_name

from ed_elarge import architectures
from ed_elarge.action_options import Action
from ed_elarge.checks import known_config
from ed_elarge.errors import KeyPath, Problem
from ed_elarge.normalize import Run

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def check(run: Run) -> None:
    """Look for everything that a run names.

    Raises:
        InputError: all that is not there, or may not be used.
    """
    prefix = run.origin.prefix
    problems = [Problem((*prefix, *path), message) for path, message in _sections(run)]
    problems += [
        Problem(action.path, message, on_key=True)
        for action in run.actions
        for message in _action(run, action)
    ]
    if problems:
        raise run.origin.error(problems)


def _sections(run: Run) -> Iterator[tuple[KeyPath, str]]:
    yield from _model(run)
    yield from _data(run)
    for i, directory in enumerate(run.eval.include_path):
        if not Path(directory).is_dir():
            yield ("eval", "include_path", i), f"no such directory: {directory}"
    if run.trainer is not None and any(action.name == "train" for action in run.actions):
        for message in unwritable(Path(run.trainer.save_directory)):
            yield ("trainer", "save_directory"), message


def _model(run: Run) -> Iterator[tuple[KeyPath, str]]:
    model = run.model
    if model is None:
        return
    if isinstance(model.tokenizer, str):
        yield from _local(("model", "tokenizer"), model.tokenizer, _TOKENIZER_FILES)
    if model.name_or_path is None:
        return
    here = ("model", "name_or_path")
    yield from _local(here, model.name_or_path, ("config.json",))
    config, known = known_config(run), architectures.model_types()
    if config is not None and config.get("model_type") not in known:
        yield (
            here,
            f"its config.json says: {unknown_name('model type', config.get('model_type'), known)}",
        )


def _local(path: KeyPath, value: str, needed: tuple[str, ...]) -> Iterator[tuple[KeyPath, str]]:
    """A directory that is not there, or is no such thing; hub ids are looked up on loading."""
    directory = Path(value).expanduser()
    if directory.is_dir():
        if not any((directory / name).exists() for name in needed):
            yield path, f"the directory holds no {' or '.join(needed)}"
    elif value.count("/") != 1 or value.startswith((".", "/", "~")):
        yield path, "no such directory here, and a hub id has the form organisation/name"


def _data(run: Run) -> Iterator[tuple[KeyPath, str]]:
    """Files that are not there; addresses (`gs://…`) are not asked."""
    if run.mixture is None:
        return
    for key in ("informs", "eval_informs"):
        for i, inform in enumerate(getattr(run.mixture, key)):
            here = ("mixture", key, i, "data_files")
            if inform.kind == "python":
                module = str(inform.data_files).partition(":")[0]
                if find_spec(module.partition(".")[0]) is None:
                    yield here, f"there is no module {module!r}"
            for file in inform.files if inform.kind in FILE_TYPES else ():
                if "://" not in file and not _exists(file):
                    yield here, f"no such file: {file}"


def _exists(file: str) -> bool:
    path = Path(file).expanduser()
    return path.exists() or bool(glob.glob(str(path), recursive=True))


def _action(run: Run, action: Action) -> Iterator[str]:
    options: Any = action.options
    if action.name == "serve":
        yield from busy(options.host, options.port)
        for file in filter(None, (options.ssl_keyfile, options.ssl_certfile)):
            if not Path(file).is_file():
                yield f"no such file: {file}"
    elif action.name in ("to_json", "to_yaml"):
        yield from unwritable(Path(options.path).parent)
    elif action.name == "eval":
        merged = options.over(run.eval)
        if merged.output_path:
            yield from unwritable(Path(merged.output_path).parent)


def busy(host: str, port: int) -> Iterator[str]:
    """Why a server could not listen, if it could not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            yield f"cannot listen on {host}:{port} ({reason}): choose another port, or 0"


def unwritable(directory: Path) -> Iterator[str]:
    """Why files could not be written in a folder, if they could not; it need not be there yet."""
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        yield f"cannot make the folder {directory}: {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"cannot write to {directory}: {existing} belongs to another user"
