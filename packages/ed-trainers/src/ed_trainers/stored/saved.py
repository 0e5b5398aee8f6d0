"""A directory of arrays and facts, the format of `save_state` and `CheckpointManager`.

orbax writes `arrays`. `state.json` contains the facts and is written after the arrays, before the
checksums of all files: a directory without `state.json` or checksums is incomplete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from ed_infra.errors import CheckpointError

from ed_trainers.stored import checksums, disk
from ed_trainers.stored.arrays import Wanted, check_fit, count_bytes, read_arrays, stored_arrays

#: Version of the directory layout; a reader refuses later versions.
FORMAT = 2

_ARRAYS, _FACTS = "arrays", "state.json"


def save_arrays(directory: Path, arrays: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
    """Write arrays by name, and facts as JSON values; return when all are on the disk.

    With several processes, all processes must call this function.

    Raises:
        CheckpointError: the directory is not empty, or the disk is full.
    """
    directory = directory.absolute()
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty: save into a new directory")
    first = jax.process_index() == 0
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / _ARRAYS, dict(arrays), force=True)
            checkpointer.wait_until_finished()
        if first:
            text = json.dumps({"format": FORMAT, **facts}) + "\n"
            (directory / _FACTS).write_text(text)
            checksums.write_checksums(directory)
    except Exception as error:
        if first:
            shutil.rmtree(directory, ignore_errors=True)
        if disk.is_full(error):
            room = disk.room(directory, count_bytes(arrays.values()))
            raise CheckpointError(f"{directory} could not be written: {room}") from error
        raise


def saved_facts(directory: Path) -> dict[str, Any]:
    """Return the facts of a directory that `save_arrays` wrote.

    Raises:
        CheckpointError: the directory has another format, or a later version.
    """
    try:
        facts = json.loads((directory / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} holds no complete saved state ({error})") from error
    check_format(facts, str(directory))
    return facts


def load_arrays(directory: Path, abstract_arrays: Wanted | None = None) -> dict[str, jax.Array]:
    """Read the files of `save_arrays` after a check of the checksums.

    Args:
        directory: the directory.
        abstract_arrays: shapes, dtypes and shardings by name; None = as written, on the default
            device.

    Raises:
        CheckpointError: a file changed since it was written, or the arrays do not match.
    """
    directory = directory.absolute()
    wrong = checksums.damage(directory)
    if wrong is not None:
        raise CheckpointError(f"{directory} is damaged: {wrong}; restore it from a copy")
    there = stored_arrays(directory / _ARRAYS)
    if abstract_arrays is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract_arrays = {
            name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=default)
            for name, leaf in there.items()
        }
    check_fit(abstract_arrays, there, str(directory))
    return read_arrays(directory / _ARRAYS, abstract_arrays)


def model_facts(model: object) -> dict[str, Any] | None:
    """Return the facts from which `ed_trainers.convert` creates a model: class name, configuration,
    and where the tensors are that the model does not compute with, with their hash."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    facts = {"class": type(model).__name__, "config": json.loads(config.to_json_string())}
    carried = getattr(model, "carried_tensors", None)
    if carried is not None and jax.process_index() == 0:  # which writes the facts
        facts["carried_tensors"] = carried.to_reference()
    return facts


def check_format(facts: Mapping[str, Any], location: str) -> None:
    """Refuse formats that this version cannot read.

    Raises:
        CheckpointError: another format.
    """
    saved_format = facts.get("format", 1)
    if saved_format != FORMAT:
        raise CheckpointError(
            f"{location} is in format {saved_format}, this version of ed-trainers reads format "
            f"{FORMAT}: "
            f"use the version that wrote it, or another save_directory"
        )
