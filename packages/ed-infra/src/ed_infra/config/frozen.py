"""Immutable values of a sealed configuration, and its mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ed_infra.errors import ConfigError, MeshError


@dataclasses.dataclass(frozen=True)
class MeshRecipe:
    """A description of a mesh that can be pickled and compared.

    Attributes:
        names: Names of the axes.
        shape: Devices along each axis.
        kinds: Names of the axes' `AxisType`.
        platform: Platform of the devices.
        devices: Ids of the devices, in the order of the mesh.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    platform: str
    devices: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> MeshRecipe:
        """Return the recipe of a mesh."""
        devices = list(mesh.devices.flat)
        return cls(
            tuple(mesh.axis_names),
            mesh.devices.shape,
            tuple(kind.name for kind in mesh.axis_types),
            devices[0].platform,
            tuple(device.id for device in devices),
        )

    def build(self) -> Mesh:
        """Create the mesh from devices of this process.

        Raises:
            MeshError: The process lacks some of the devices.
        """
        try:
            local_devices = {device.id: device for device in jax.devices(self.platform)}
        except RuntimeError:
            local_devices = {}
        missing = [number for number in self.devices if number not in local_devices]
        if missing:
            axis_sizes = ", ".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))
            raise MeshError(
                f"this configuration was pickled with an explicit mesh ({axis_sizes}) over "
                f"{len(self.devices)} {self.platform} devices, and {len(missing)} of them are not "
                f"in this process: create a mesh and call config.set_model_mesh(mesh), or use "
                "config.from_dict(config.to_dict()), whose mesh follows from sharding_axis_dims"
            )
        array = np.asarray([local_devices[number] for number in self.devices], dtype=object)
        kinds = tuple(AxisType[kind] for kind in self.kinds)
        return Mesh(array.reshape(self.shape), self.names, axis_types=kinds)


@dataclasses.dataclass
class Runtime:
    """State of a configuration in addition to its values; it is not saved.

    Attributes:
        sealed: Whether a module uses the configuration.
        mesh: The mesh, after it was created or set.
        custom: The explicitly set mesh, which replaces the mesh of the fields.
        key: Canonical JSON of a sealed configuration.
    """

    sealed: bool = False
    mesh: Mesh | None = None
    custom: MeshRecipe | None = None
    key: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return Runtime(self.sealed, self.mesh, self.custom)  # a mesh is never copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Runtime, (self.sealed, None, self.custom)  # devices stay in their process


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "this value belongs to the configuration of a model and cannot be changed in place; create "
        "a new configuration with config.replace(name=value)"
    )


class FrozenDict(dict):
    """An immutable `dict`. Writing an equal value is allowed."""

    # transformers writes equal values when it reads rope parameters.
    def __setitem__(self, key: object, value: object) -> None:
        if key not in self or self[key] != value:
            _refuse()

    def setdefault(self, key: object, default: object = None) -> Any:
        return self[key] if key in self else _refuse()

    __delitem__ = clear = pop = popitem = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict:
        return thaw(self)

    __copy__ = copy = lambda self: dict(self)


class FrozenList(list):
    """An immutable `list`."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list:
        return thaw(self)

    __copy__ = copy = lambda self: list(self)


def freeze(value: object) -> Any:
    """Return `value` with all lists and dicts replaced by immutable ones."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list):
        return FrozenList(freeze(item) for item in value)
    return value


def thaw(value: object) -> Any:
    """Return a copy of `value` with mutable lists and dicts."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value
