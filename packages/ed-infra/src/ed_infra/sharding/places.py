"""The mesh axes that split each dimension of an array. This module does not import jax.

`ed_infra.sharding.partition` converts the results to partition specs. A plan of memory uses them
without jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ed_infra.errors import ConfigError, MeshError, did_you_mean
from ed_infra.sharding.axes import PARAM_AXES, MeshAxes, PartitionAxis, split_mesh_axes


def look_up(
    axis: PartitionAxis, name: str | None, table: Mapping[str, str | None], kind: str
) -> MeshAxes:
    """Return the mesh axes of a logical axis.

    Args:
        axis: the mesh axes of each kind of dimension.
        name: a key of `table`, a mesh axis, a field of `PartitionAxis`, or None.
        table: logical axis -> field of `PartitionAxis`.
        kind: "parameter" or "activation", for the message.

    Raises:
        ConfigError: the axis is unknown.
    """
    if name is None:
        return None
    if name in table:
        field = table[name]
        return None if field is None else getattr(axis, field)
    if name in axis.mesh_axes():
        return name
    field = name if name.endswith("_axis") else f"{name}_axis"
    if field in PartitionAxis.__dataclass_fields__:
        return getattr(axis, field)
    known_axes = ", ".join([*table, *sorted(axis.mesh_axes())])
    raise ConfigError(
        f"unknown {kind} axis {name!r}{did_you_mean(name, table)} (known: {known_axes})"
    )


def get_parameter_axes(
    axis: PartitionAxis,
    axes: Sequence[str | None],
    shape: Sequence[int] | None = None,
    sizes: Mapping[str, int] | None = None,
    expert_axes: Sequence[str] = (),
) -> list[MeshAxes]:
    """Return the mesh axes of each dimension of a parameter; each mesh axis occurs once.

    Args:
        axis: the mesh axes of each kind of dimension.
        axes: logical axes of one layer (keys of `PARAM_AXES`).
        shape, sizes: shape of one layer, and the size of each mesh axis. Without them, only
            `axis.expert_axis` splits experts.
        expert_axes: further mesh axes of experts, used if the number of experts is divisible.
    """
    places = [look_up(axis, name, PARAM_AXES, "parameter") for name in axes]
    if shape is not None and sizes is not None and "expert" in axes:
        at = list(axes).index("expert")
        places[at] = _get_expert_axes(split_mesh_axes(places[at]), shape[at], sizes, expert_axes)
    return distinct(places)


def _get_expert_axes(
    names: tuple[str, ...], experts: int, sizes: Mapping[str, int], more: Sequence[str]
) -> MeshAxes:
    """Return the mesh axes over which the experts are split, in the order of the mesh."""
    selected_names = [name for name in names if name in sizes]
    for name in more:
        ways = math.prod(sizes[axis] for axis in (*selected_names, name) if axis in sizes)
        if name not in selected_names and name in sizes and experts % ways == 0:
            selected_names.append(name)
    return tuple(sorted(selected_names, key=list(sizes).index))


def distinct(places: Sequence[MeshAxes]) -> list[MeshAxes]:
    """Keep the first use of each mesh axis, because an array can use an axis only once."""
    used: set[str] = set()
    result: list[MeshAxes] = []
    for entry in places:
        new_names = tuple(name for name in split_mesh_axes(entry) if name not in used)
        used.update(new_names)
        result.append(new_names[0] if len(new_names) == 1 else new_names or None)
    return result


def fit_places(
    places: Sequence[MeshAxes], shape: Sequence[int] | None, sizes: Mapping[str, int]
) -> tuple[list[MeshAxes], list[str]]:
    """Drop mesh axes that the mesh lacks, or that do not divide a dimension.

    Mesh axes of size 1 are also dropped, so that equal placements are equal.

    Args:
        places: one entry for each dimension, or fewer.
        shape: sizes of the dimensions; None = do not check divisibility.
        sizes: size of each mesh axis.

    Returns:
        The places, and a message for each dimension that is replicated because it is indivisible.

    Raises:
        MeshError: there are more places than dimensions.
    """
    if shape is not None and len(places) > len(shape):
        raise MeshError(
            f"partition spec {tuple(places)} has {len(places)} entries for an array of "
            f"{len(shape)} dimensions {tuple(shape)}"
        )
    entries: list[MeshAxes] = []
    notes: list[str] = []
    for i, entry in enumerate(places):
        names = tuple(name for name in split_mesh_axes(entry) if sizes.get(name, 1) > 1)
        ways = math.prod(sizes[name] for name in names)
        if shape is not None and shape[i] % ways:
            notes.append(
                f"dimension {i} of {tuple(shape)} does not divide by {'×'.join(names)} = {ways}"
            )
            names = ()
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return entries, notes
