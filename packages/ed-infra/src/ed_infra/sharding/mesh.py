"""Device meshes: five named axes over the devices, with `-1` for the remaining devices.

A mesh has parts along an axis, and an array has shards on a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, Sharding

from ed_infra.errors import MeshError, did_you_mean
from ed_infra.sharding.axes import AXIS_NAMES, check_axis_names, resolve_axis_dims

# jax.Device is a variable to type checkers.
Device = Any

__all__ = ["AXIS_NAMES", "create_mesh", "resolve_axis_dims"]


def create_mesh(
    dims: Sequence[int] = (1, -1, 1, 1, 1),
    names: Sequence[str] = AXIS_NAMES,
    dcn_dims: Sequence[int] | None = None,
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    *,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
) -> Mesh:
    """Create a mesh with automatic axis types.

    Args:
        dims: Devices along each axis; with `dcn_dims`, devices along each axis inside a slice.
        names: Names of the axes.
        dcn_dims: Slices along each axis. Axis `i` of the mesh has `dcn_dims[i] * dims[i]` entries,
            with neighbors inside a slice first. Slices are TPU slices, or processes, or equal parts
            of the devices of one process.
        devices: Devices of the mesh; the default is all devices of `backend`.
        backend: `"cpu"`, `"gpu"` or `"tpu"`; None = the default backend.
        process_is_granule: Whether `dcn_dims` count processes instead of TPU slices.
        should_sort_granules_by_key: Whether slices (or processes) are ordered by their number
            instead of their first device.
        allow_split_physical_axes: Whether an axis of a TPU torus may be split over several mesh
            axes.

    Raises:
        MeshError: The sizes do not match the devices, or the backend is not available.
    """
    check_axis_names(names)
    from ed_infra.forked_children import guard_forked_children

    guard_forked_children()
    devices = list(devices) if devices is not None else _devices(backend)
    if dcn_dims is not None and math.prod(dcn_dims) != 1:
        granules = _granules(
            devices,
            math.prod(d for d in dcn_dims if d != -1),
            -1 in dcn_dims,
            ("process_index",) if process_is_granule else ("slice_index", "process_index"),
            should_sort_granules_by_key,
        )
        array = _hybrid(dims, names, dcn_dims, granules, allow_split_physical_axes)
    else:
        shape = resolve_axis_dims(dims, len(devices), names)
        array = _arrange(shape, devices, allow_split_physical_axes)
    return Mesh(array, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def _devices(backend: str | None) -> list[Device]:
    try:
        return list(jax.devices(backend or None))
    except RuntimeError as error:
        there = jax.default_backend()
        raise MeshError(
            f"backend {backend!r} is not available here; the default backend is {there!r} with "
            f"{jax.device_count()} device(s). Leave backend unset to use it ({error})"
        ) from None


def _arrange(shape: tuple[int, ...], devices: list[Device], split: bool) -> np.ndarray:
    count = math.prod(shape)
    if count < len(devices) and jax.process_count() > 1:
        raise MeshError(
            f"a mesh of {count} devices does not use {len(devices) - count} of {len(devices)} "
            f"devices, but all {jax.process_count()} processes must participate: use all devices"
        )
    if count == len(devices) and devices[0].platform == "tpu":
        # Follow the torus, so that neighbors in the mesh are neighbors in the machine.
        return _torus(shape, devices, split)
    return np.asarray(devices[:count], dtype=object).reshape(shape)


def _torus(shape: tuple[int, ...], devices: list[Device], split: bool) -> np.ndarray:
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
    except NotImplementedError as error:
        raise MeshError(
            f"a mesh of shape {shape} splits an axis of the TPU's torus: choose other sizes, or "
            f"allow_split_physical_axes=True ({error})"
        ) from None


def _hybrid(
    dims: Sequence[int],
    names: Sequence[str],
    dcn_dims: Sequence[int],
    granules: list[list[Device]],
    split: bool,
) -> np.ndarray:
    if len(dcn_dims) != len(names):
        raise MeshError(
            f"{len(dcn_dims)} DCN dims {tuple(dcn_dims)} for {len(names)} axes {tuple(names)}"
        )
    outer = tuple(dcn_dims)
    if -1 in outer:
        outer = resolve_axis_dims(dcn_dims, len(granules), names)
    if math.prod(outer) != len(granules):
        raise MeshError(
            f"DCN dims {tuple(dcn_dims)} need {math.prod(outer)} slices, but there are "
            f"{len(granules)} slices or processes: the product must be {len(granules)}"
        )
    inner = resolve_axis_dims(dims, len(granules[0]), names)
    if math.prod(inner) != len(granules[0]):
        raise MeshError(
            f"mesh axes {tuple(dims)} need {math.prod(inner)} devices of a slice, but each slice "
            f"has {len(granules[0])}: over a data-center network every device must be used"
        )
    array = np.empty([o * i for o, i in zip(outer, inner, strict=True)], dtype=object)
    for place, granule in zip(np.ndindex(*outer), granules, strict=True):
        window = tuple(slice(p * i, (p + 1) * i) for p, i in zip(place, inner, strict=True))
        if granule[0].platform == "tpu":
            array[window] = _torus(inner, granule, split)
        else:
            array[window] = np.asarray(granule, dtype=object).reshape(inner)
    return array


def _granules(
    devices: list[Device], granule_count: int, free: bool, keys: tuple[str, ...], ordered: bool
) -> list[list[Device]]:
    groups: dict[int, list[Device]] = {}
    for key in keys:
        groups = {}
        for device in devices:
            groups.setdefault(getattr(device, key, 0) or 0, []).append(device)
        if len(groups) > 1:
            break
    if len(groups) == 1 and not free:
        if len(devices) % granule_count:
            raise MeshError(
                f"DCN dims need {granule_count} slices, and {len(devices)} devices do not divide "
                "into "
                f"{granule_count} equal parts"
            )
        size = len(devices) // granule_count
        return [devices[i * size : (i + 1) * size] for i in range(granule_count)]
    sizes = {len(group) for group in groups.values()}
    if len(sizes) > 1:
        raise MeshError(f"slices of unequal sizes {sorted(sizes)} cannot form a mesh")
    return [groups[key] for key in (sorted(groups) if ordered else groups)]


def split_mesh(mesh: Mesh, axis: str) -> list[Mesh]:
    """Split a mesh along an axis into meshes in which this axis has size 1.

    Raises:
        MeshError: The mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise MeshError(
            f"the mesh has no axis {axis!r}{did_you_mean(axis, mesh.axis_names)}: its axes are "
            f"{', '.join(map(str, mesh.axis_names))}"
        )
    parts = np.split(mesh.devices, mesh.shape[axis], axis=mesh.axis_names.index(axis))
    return [Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in parts]


def part_on(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return the array on fewer devices, without a copy of its shards.

    Both arrays share the shards, so donating or deleting one array deletes the shards of both.

    Args:
        array: The array; other processes may hold shards.
        sharding: The sharding of the result.

    Returns:
        An array with the sharding. `array` itself, if the devices are the same or a device does not
        hold exactly its shard.
    """
    devices = sharding.device_set
    if not devices < array.sharding.device_set:
        return array

    def edges(of: Sharding) -> dict[Any, list[tuple[int, int, int]]]:
        places = of.devices_indices_map(array.shape).items()
        return {
            device: [one.indices(size) for one, size in zip(index, array.shape, strict=True)]
            for device, index in places
            if device in devices
        }

    if edges(sharding) != edges(array.sharding):
        return array
    local_shards = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [local_shards[device] for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
