"""Named arrays in a directory: orbax writes them with checksums, and reads them onto any mesh.

The name of an array is its storage path, joined by `/`. Arrays of stacked layers can be read into
separate layers and vice versa. Parameters stored below float32 can be read from float32 parameters
and vice versa, through the masters of the optimizer.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.parameter_names import canonical, is_stacked, normalize_parameter_name
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from ed_trainers.stored.library_log import hush_logger

T = TypeVar("T")
Wanted = Mapping[str, jax.ShapeDtypeStruct]

# Paths of the parameters in the state of a run, and of their float32 masters.
_PARAMETERS = "graphstate."
_MASTER = re.compile(r"opt_state\.(?:inner\.)*masters\.(?P<parameter>.+)")


class StoredArray(Protocol):
    """Metadata of one array of a checkpoint."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the array."""
        ...

    @property
    def dtype(self) -> Any:
        """dtype of the array."""
        ...


def leaf_names(tree: object) -> list[str]:
    """Return the name of each leaf in the order of `jax.tree.leaves`: its storage path, joined by
    `/`."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return ["/".join(str(part) for part in normalize_parameter_name(path)) for path in paths]


def flat_arrays(tree: object) -> dict[str, jax.Array]:
    """Return the leaves by name, as they are saved, without classes."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def flat_abstract(tree: object) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of each leaf by name."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in flat_arrays(tree).items()
    }


def from_flat(template: T, arrays: Mapping[str, jax.Array]) -> T:
    """Return the structure of `template` with these named arrays."""
    leaves = [arrays[name] for name in leaf_names(template)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def count_bytes(arrays: Iterable[jax.Array]) -> int:
    """Return the size of arrays in bytes; copies on several devices count once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)


def stored_arrays(directory: Path) -> dict[str, StoredArray]:
    """Return shape and dtype of each array in a directory of orbax.

    Raises:
        CheckpointError: the directory has no arrays.
    """
    with hush_logger(), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(directory).item_metadata
    if metadata is None:
        raise CheckpointError(f"{directory} holds no arrays of a checkpoint")
    return dict(metadata.tree)


def save_step(directory: Path, tree: Mapping[str, object], item: str) -> None:
    """Write a tree as step 0 of a run in the layout of MaxText: OCDBT, and version 3 of zarr.

    Args:
        directory: the folder of steps; it must be new or empty.
        tree: nested mappings of arrays and numbers.
        item: name of the tree in the folder of the step.
    """
    manager = ocp.CheckpointManager(
        directory.absolute(),
        item_names=(item,),
        item_handlers={item: ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)},
        options=ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False),
    )
    with hush_logger(), manager:
        manager.save(0, args=ocp.args.Composite(**{item: ocp.args.PyTreeSave(tree)}))


def read_arrays(directory: Path, abstract_arrays: Wanted) -> dict[str, jax.Array]:
    """Read arrays in the requested shapes, dtypes and shardings.

    Args:
        directory: directory that orbax wrote.
        abstract_arrays: names in the storage of the reader; see `check_fit` for the possible
            differences.
    """
    plan = _plan(abstract_arrays, stored_arrays(directory))
    args = ocp.args.PyTreeRestore(
        item=plan.reads,
        restore_args=ocp.checkpoint_utils.construct_restore_args(plan.reads),
        partial_restore=True,  # the other arrays are not read
    )
    with hush_logger(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        raw = dict(checkpointer.restore(directory, args=args))
    # The last reader of an array frees it, so that both storages never exist completely.
    last = {piece.stored: name for name, pieces in plan.pieces.items() for piece in pieces}
    arrays = {}
    for name, pieces in plan.pieces.items():
        arrays[name] = _assemble_array(abstract_arrays[name], pieces, raw)
        for stored in {piece.stored for piece in pieces}:
            if last[stored] == name:
                del raw[stored]
    return arrays


def check_fit(
    abstract_arrays: Wanted,
    saved: Mapping[str, StoredArray],
    location: str,
    *,
    dtypes: bool = False,
) -> None:
    """Compare names and shapes, and optionally dtypes, of requested and saved arrays.

    Stacked and separate layers are compatible. The dtype of a parameter may differ if one of the
    two runs has a float32 master of it.

    Raises:
        CheckpointError: the message names the first differences.
    """
    plan = _plan(abstract_arrays, saved)
    problems = [f"{name} is missing" for name in plan.missing]
    problems += [f"{name} is not in the model" for name in plan.unused]
    for name, pieces in plan.pieces.items():
        leaf, stacked = abstract_arrays[name], is_stacked(name.split("/"))
        for piece in pieces[:1]:
            there = saved[piece.stored]
            stored_shape = tuple(there.shape[1:] if piece.entry is not None else there.shape)
            if stored_shape != tuple(leaf.shape[1:] if stacked else leaf.shape):
                shapes = f"{tuple(there.shape)}, the model requires {tuple(leaf.shape)}"
                problems.append(f"{name} has shape {shapes}")
            elif dtypes and there.dtype != leaf.dtype and not plan.through_masters(name):
                problems.append(f"{name} is {there.dtype}, the model requires {leaf.dtype}")
    if problems:
        listing = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{location} does not fit this model and optimizer: {listing}{more}")


@dataclass(frozen=True)
class _Piece:
    """A stored array, or one layer of a stacked array."""

    stored: str
    entry: int | None


@dataclass(frozen=True)
class _Plan:
    """The stored arrays to read, and the construction of the requested arrays from them."""

    reads: dict[str, jax.ShapeDtypeStruct]
    pieces: dict[str, list[_Piece]]
    missing: list[str]
    unused: list[str]
    mastered: frozenset[str]

    def through_masters(self, name: str) -> bool:
        """Whether a parameter is read from a master, or a master from a parameter."""
        return all(one in self.mastered for one in canonical(name.split("/")))


def _plan(abstract_arrays: Wanted, saved: Mapping[str, StoredArray]) -> _Plan:
    there: dict[str, _Piece] = {}
    for name in saved:
        path = name.split("/")
        entries = range(len(canonical(path))) if is_stacked(path) else [None]
        for one, entry in zip(canonical(path), entries, strict=True):
            there[one] = _Piece(name, entry)
    target_masters = _masters(one for name in abstract_arrays for one in canonical(name.split("/")))
    masters = _masters(there)

    def source(one: str) -> str:
        """Return the canonical name of a saved array."""
        of = _MASTER.fullmatch(one)
        if of is not None and one not in there:
            return _PARAMETERS + of["parameter"]
        return one if one in target_masters else masters.get(one, one)

    pieces, missing, reads, used, mastered = {}, [], {}, set(), set()
    for name, leaf in abstract_arrays.items():
        path = name.split("/")
        sources = {one: source(one) for one in canonical(path)}
        if any(origin not in there for origin in sources.values()):
            missing.append(name)
            continue
        used.update(sources.values())
        mastered |= {
            one
            for one in sources
            if sources[one] != one or (one in target_masters) != (one in masters)
        }
        pieces[name] = [there[origin] for origin in sources.values()]
        for piece in pieces[name]:
            sharding = _restack_sharding(leaf.sharding, is_stacked(path), piece.entry is not None)
            previous_leaf = reads.get(piece.stored, leaf)
            reads[piece.stored] = jax.ShapeDtypeStruct(
                tuple(saved[piece.stored].shape),
                jnp.promote_types(previous_leaf.dtype, leaf.dtype),
                sharding=sharding,
            )
    # A float32 run reads the masters, and not the rounded parameters.
    used |= {parameter for parameter, master in masters.items() if master in used}
    unused = [name for name in saved if not used.issuperset(canonical(name.split("/")))]
    return _Plan(reads, pieces, missing, unused, frozenset(mastered))


def _masters(names: Iterable[str]) -> dict[str, str]:
    """Return the canonical names of parameters, and of their masters, of a state."""
    matches = [match for match in map(_MASTER.fullmatch, names) if match is not None]
    return {_PARAMETERS + match["parameter"]: match[0] for match in matches}


def _restack_sharding(sharding: object, stacked: bool, stored_stacked: bool) -> Any:
    """Return the sharding of a stored array, derived from the sharding of the requested array."""
    if stacked == stored_stacked or not isinstance(sharding, NamedSharding):
        return sharding
    spec = tuple(sharding.spec)
    spec = spec[1:] if stacked else (None, *spec)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _assemble_array(
    leaf: jax.ShapeDtypeStruct, pieces: list[_Piece], raw: Mapping[str, jax.Array]
) -> jax.Array:
    stored = [raw[piece.stored] for piece in pieces]
    same_layout = len({piece.stored for piece in pieces}) == 1 and stored[0].shape == leaf.shape
    if same_layout and [piece.entry for piece in pieces] in ([None], list(range(len(pieces)))):
        same = stored[0].dtype == leaf.dtype and stored[0].sharding == leaf.sharding
        return stored[0] if same else _cast(leaf.sharding, leaf.dtype)(stored[0])
    layers = [
        array if piece.entry is None else _entry(array, piece.entry)
        for array, piece in zip(stored, pieces, strict=True)
    ]
    if len(leaf.shape) == layers[0].ndim:
        return _cast(leaf.sharding, leaf.dtype)(layers[0])
    return _stack(leaf.sharding, leaf.dtype)(layers)


@jax.jit
def _entry(array: jax.Array, entry: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, entry, 0, keepdims=False)


@lru_cache(maxsize=256)
def _cast(sharding: Sharding | None, dtype: DTypeLike) -> Any:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)


@lru_cache(maxsize=256)
def _stack(sharding: Sharding | None, dtype: DTypeLike) -> Any:
    return jax.jit(lambda xs: jnp.stack(xs).astype(dtype), out_shardings=sharding)


#: Maximum size of all arrays of a file after decompression, in bytes.
MAX_BYTES = 2**34


def read_npz(source: Path | IO[bytes], name: str) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file.

    Args:
        name: name of the file, for errors.

    Raises:
        ConfigError: the file is damaged, or its arrays are larger than `MAX_BYTES`.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{name} is damaged ({error}): delete it, or restore a copy") from error
    if size > MAX_BYTES:
        raise ConfigError(
            f"{name} expands to {size} bytes, and at most {MAX_BYTES} are read: the file is "
            "damaged or hostile; delete it, or restore a copy"
        )
    if not isinstance(source, Path):
        source.seek(0)
    with np.load(source, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
