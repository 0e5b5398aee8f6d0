"""Arrays in a folder that Orbax wrote, by name, without Orbax: `_METADATA` lists the names.

    _METADATA, manifest.ocdbt, d/…            one database for all arrays (OCDBT)
    _METADATA, params.params.decoder.…/…      a folder of zarr for each array

`tensorstore` reads both, in version 2 or 3 of zarr. The values of an array are read when they are
needed. Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ed_infra.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from tensorstore import Context, TensorStore

    from ed_models.checkpoints.tensor_files import Index

ORBAX_METADATA, MODEL_CONFIG = "_METADATA", "config.json"
#: Names of the item with the parameters, in the folder of a step.
_ITEMS = ("items", "model_params", "params", "model")
#: The folder with the steps of a run.
_STEPS = "checkpoints"
#: Levels above an item that are searched for `config.json`: step, steps and run.
_LEVELS = 3
_MAX_METADATA = 2**27  # bytes
_MAX_ARRAYS = 1_000_000
_MAX_PARTS = 64
_MAX_DIMENSIONS = 8
_CACHE = 2**28  # bytes of decoded metadata and chunks
#: A part of a name.
_PART = re.compile(r"[\w\-]{1,200}")
#: Kinds of values that are arrays; the others are numbers, texts and empty containers.
_ARRAY_TYPES = ("jax.Array", "np.ndarray")


def find_orbax_item(folder: Path) -> Path | None:
    """Return the folder with the parameters that Orbax wrote; None if there is none.

    Args:
        folder: an item, a step, or a folder of steps, of which the last one is used.
    """
    for place in (folder, *(folder / name for name in _ITEMS)):
        if (place / ORBAX_METADATA).is_file():
            return place
    for place in (folder, folder / _STEPS):
        steps = (
            [step for step in place.iterdir() if step.name.isdecimal()] if place.is_dir() else []
        )
        for step in sorted(steps, key=lambda step: int(step.name), reverse=True):
            for name in _ITEMS:
                if (step / name / ORBAX_METADATA).is_file():
                    return step / name
    return None


def find_orbax_config(item: Path, folder: Path | None = None) -> Path | None:
    """Return `config.json` of the model in an item; None if there is none.

    Args:
        item: the folder with the parameters.
        folder: the folder to search; None = the item and the three folders above it.
    """
    item = item.absolute()
    places = [item, *[*item.parents][:_LEVELS]] if folder is None else [folder]
    return next(
        (place / MODEL_CONFIG for place in places if (place / MODEL_CONFIG).is_file()), None
    )


class OrbaxFolder(NamedTuple):
    """The names of the arrays in a folder, and how their values are stored.

    Attributes:
        path: the folder with `_METADATA`.
        names: keys of the tree, joined by dots.
        is_database: all arrays are in one OCDBT database.
        driver: `zarr` (version 2) or `zarr3`.
        is_complete: each chunk of an array is stored, also those of zeros.
    """

    path: Path
    names: frozenset[str]
    is_database: bool
    driver: str
    is_complete: bool

    def open_array(self, name: str) -> OrbaxArray:
        """Open one array; its values are not read.

        Raises:
            CheckpointError: the array is damaged or absent, or has a format that is not read.
        """
        import tensorstore

        from ed_models.checkpoints.tensor_files import DTYPES

        base = {"driver": "file", "path": f"{self.path.absolute()}/"}
        store: dict[str, Any] = {"driver": "file", "path": f"{self.path.absolute() / name}/"}
        if self.is_database:
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        elif not (self.path / name).resolve().is_relative_to(self.path.resolve()):
            raise CheckpointError(f"{self.path / name} leads out of {self.path}: copy it there")
        description: dict[str, Any] = {"driver": self.driver, "kvstore": store}
        if self.is_complete:
            description["fill_missing_data_reads"] = False
        try:
            array = tensorstore.open(
                description, open=True, read=True, context=_get_context()
            ).result()
        except (ValueError, OSError, NotImplementedError) as error:
            raise CheckpointError(_describe_damage(self.path, name, error)) from error
        dtype = array.dtype.numpy_dtype
        if dtype not in DTYPES.values() or array.rank > _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self.path}: the array {name} has dtype {array.dtype.name} and {array.rank} "
                f"dimensions; arrays of plain numbers up to {_MAX_DIMENSIONS} dimensions are read"
            )
        return OrbaxArray(self.path, name, tuple(array.shape), dtype, array)


@dataclass(frozen=True, eq=False)
class OrbaxArray:
    """One array of a folder.

    Attributes:
        folder: the folder with `_METADATA`.
        name: keys of the tree, joined by dots.
        shape, dtype: of the whole array.
        store: the opened array.
    """

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    store: TensorStore

    def read(self, index: Index = ()) -> np.ndarray:
        """Return `array[index]`; only the chunks of these positions are read.

        Raises:
            CheckpointError: a chunk is damaged or absent.
        """
        import numpy as np

        try:
            return np.asarray((self.store[index] if index else self.store).read().result())
        except (ValueError, IndexError, OSError) as error:
            raise CheckpointError(_describe_damage(self.folder, self.name, error)) from error


@cache
def _get_context() -> Context:
    """Return the cache that all arrays share; each one would read the database again."""
    import tensorstore

    return tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})


def _describe_damage(folder: Path, name: str, error: Exception) -> str:
    return (
        f"{folder}: the array {name} is damaged or absent ({str(error)[:300]}): copy or save the "
        "checkpoint again"
    )


def open_orbax_folder(item: Path) -> OrbaxFolder:
    """Read the list of arrays in a folder.

    Raises:
        CheckpointError: the list is damaged or too large, or names something else than arrays.
    """
    path = item / ORBAX_METADATA
    if path.stat().st_size > _MAX_METADATA:
        raise CheckpointError(f"{path} is larger than {_MAX_METADATA} bytes: this is no list")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = frozenset(_list_names(content["tree_metadata"]))
        is_database, is_new = (bool(content.get(key, False)) for key in ("use_ocdbt", "use_zarr3"))
        is_complete = bool(content.get("store_array_data_equal_to_fill_value", False))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!r}): copy or save the checkpoint again"
        ) from error
    if len(names) > _MAX_ARRAYS:
        raise CheckpointError(f"{path} names {len(names)} arrays; at most {_MAX_ARRAYS} are read")
    return OrbaxFolder(item, names, is_database, "zarr3" if is_new else "zarr", is_complete)


def _list_names(tree: dict[str, Any]) -> Iterator[str]:
    for entry in tree.values():
        if entry["value_metadata"]["value_type"] in _ARRAY_TYPES:
            parts = [str(key["key"]) for key in entry["key_metadata"]]
            if not 0 < len(parts) <= _MAX_PARTS or not all(map(_PART.fullmatch, parts)):
                raise ValueError(f"{str(parts)[:200]} is no name of an array")
            yield ".".join(parts)
