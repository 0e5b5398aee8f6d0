"""Device meshes: five named axes over the devices, with `-1` for the devices that remain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from ed_infra.errors import MeshError
from ed_infra.sharding.axes import AXIS_NAMES, check_names, check_sizes

# jax.Device is a variable to type checkers.
Device = Any

__all__ = ["AXIS_NAMES", "create_mesh", "resolve_axis_dims"]


def resolve_axis_dims(
    dims: Sequence[int], device_count: int, names: Sequence[str] = AXIS_NAMES
) -> tuple[int, ...]:
    """Replace `-1` in `dims` by the number of devices that the other axes leave.

    A product smaller than `device_count` is allowed without a `-1`: the mesh then takes the first
    devices.

    Raises:
        MeshError: two `-1`, a size below 1, or sizes that the devices do not divide into; the
            message says the arithmetic.
    """
    dims = tuple(int(d) for d in dims)
    if len(dims) != len(names):
        raise MeshError(
            f"{len(dims)} axis dims {dims} for {len(names)} axis names {tuple(names)}: "
            "give one size for each name"
        )
    shown = ", ".join(f"{n}={d}" for n, d in zip(names, dims, strict=True))
    check_sizes(dims, names)
    fixed = math.prod(d for d in dims if d != -1)
    product = " × ".join(str(d) for d in dims if d != -1)
    if -1 not in dims:
        if fixed > device_count:
            raise MeshError(
                f"mesh axes ({shown}) take {product} = {fixed} devices, but there are "
                f"{device_count}: make the product at most {device_count}, or one axis -1"
            )
        return dims
    if device_count % fixed:
        divisors = [d for d in range(1, device_count + 1) if device_count % d == 0]
        raise MeshError(
            f"mesh axes ({shown}): {device_count} devices / ({product}) = "
            f"{device_count / fixed:g} is not whole, so -1 cannot be resolved: the other sizes "
            f"must multiply to one of {', '.join(map(str, divisors))}"
        )
    return tuple(device_count // fixed if d == -1 else d for d in dims)


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
    """Make a mesh with automatic axis types.

    Args:
        dims: devices along each axis; with `dcn_dims`, devices along each axis *inside a slice*.
        names: names of the axes.
        dcn_dims: slices along each axis. The mesh's axis `i` has `dcn_dims[i] * dims[i]` entries,
            neighbours inside a slice first. Slices are TPU slices, else processes, else (one
            process, for trying it out) equal parts of the devices in order.
        devices: of the mesh; all devices of `backend` by default.
        backend: `"cpu"`, `"gpu"` or `"tpu"`; None = the default backend.
        process_is_granule: `dcn_dims` count processes, even where there are TPU slices.
        should_sort_granules_by_key: order slices (or processes) by their number, instead of by
            their first device.
        allow_split_physical_axes: an axis of a TPU's torus may serve several mesh axes; without
            it, sizes that need that are an error.

    Raises:
        MeshError: the sizes do not fit the devices, or the backend is not there.
    """
    check_names(names)
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
            f"a mesh of {count} devices leaves {len(devices) - count} of {len(devices)} unused, "
            f"and with {jax.process_count()} processes each must take part: use all of them"
        )
    if count == len(devices) and devices[0].platform == "tpu":
        # Follows the torus, so that neighbours in the mesh are neighbours in the machine.
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
            f"DCN dims {tuple(dcn_dims)} take {math.prod(outer)} slices, but there are "
            f"{len(granules)} slices or processes: the product must be {len(granules)}"
        )
    inner = resolve_axis_dims(dims, len(granules[0]), names)
    if math.prod(inner) != len(granules[0]):
        raise MeshError(
            f"mesh axes {tuple(dims)} take {math.prod(inner)} devices of a slice, but each slice "
            f"has {len(granules[0])}: over a data-centre network every device must be used"
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
    devices: list[Device], wanted: int, free: bool, keys: tuple[str, ...], ordered: bool
) -> list[list[Device]]:
    groups: dict[int, list[Device]] = {}
    for key in keys:
        groups = {}
        for device in devices:
            groups.setdefault(getattr(device, key, 0) or 0, []).append(device)
        if len(groups) > 1:
            break
    if len(groups) == 1 and not free:
        if len(devices) % wanted:
            raise MeshError(
                f"DCN dims take {wanted} slices, and {len(devices)} devices do not divide into "
                f"{wanted} equal parts"
            )
        size = len(devices) // wanted
        return [devices[i * size : (i + 1) * size] for i in range(wanted)]
    sizes = {len(group) for group in groups.values()}
    if len(sizes) > 1:
        raise MeshError(f"slices of unequal sizes {sorted(sizes)} cannot form a mesh")
    return [groups[key] for key in (sorted(groups) if ordered else groups)]
