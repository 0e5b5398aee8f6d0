"""Parts of a mesh along one axis, and the shards of an array on one part."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from ed_infra.errors import MeshError, did_you_mean


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
