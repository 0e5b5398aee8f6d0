"""`PartitionManager`: from logical axes to partition specs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ed_infra.errors import ConfigError, MeshError, did_you_mean
from ed_infra.sharding.axes import (
    ACTIVATION_AXES,
    DECODE_AXES,
    PARAM_AXES,
    MeshAxes,
    PartitionAxis,
    split,
)

__all__ = ["ACTIVATION_AXES", "PARAM_AXES", "PartitionAxis", "PartitionManager", "fit_spec"]


@dataclasses.dataclass(frozen=True)
class PartitionManager:
    """Resolves logical axes to `PartitionSpec`s with a `PartitionAxis`.

    Attributes:
        axis: The mesh axes over which each kind of dimension is split.
        expert_axes: Mesh axes over which experts are split in addition to `axis.expert_axis`, in
            this order, if the number of experts is divisible. The other axes may split the
            dimensions of an expert.
    """

    axis: PartitionAxis = dataclasses.field(default_factory=PartitionAxis)
    expert_axes: tuple[str, ...] = ()

    def param(
        self,
        axes: Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> PartitionSpec:
        """Return the spec of a parameter from its logical axes (keys of `PARAM_AXES`).

        Args:
            axes: Logical axes of one layer.
            shape, mesh: Shape of one layer, and its mesh. Without them, only `axis.expert_axis`
                splits experts. Other dimensions are not checked against their sizes.

        Raises:
            ConfigError: An axis is unknown.
        """
        places = [self._look_up(a, PARAM_AXES, "parameter") for a in axes]
        if shape is not None and mesh is not None and "expert" in axes:
            at = list(axes).index("expert")
            places[at] = self._experts(split(places[at]), shape[at], mesh)
        return PartitionSpec(*_distinct(places))

    def _experts(self, names: tuple[str, ...], experts: int, mesh: Mesh | AbstractMesh) -> MeshAxes:
        """Return the mesh axes over which the experts are split, in the order of the mesh."""
        chosen = [name for name in names if name in mesh.shape]
        for name in self.expert_axes:
            ways = math.prod(mesh.shape[axis] for axis in (*chosen, name) if axis in mesh.shape)
            if name not in chosen and name in mesh.shape and experts % ways == 0:
                chosen.append(name)
        return tuple(sorted(chosen, key=mesh.axis_names.index))

    def resolve(
        self,
        axes: Sequence[str | None],
        mode: str = "train",
        shape: Sequence[int] | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> PartitionSpec:
        """Return the spec of an activation.

        Args:
            axes: For each dimension a key of `ACTIVATION_AXES`, a mesh axis, or None.
            mode: `"train"` or `"prefill"` (whole sequences), or `"decode"` (one token each).
            shape: Shape of the array; with `mesh`, indivisible dimensions are replicated.
            mesh: Mesh of the array; axes that the mesh lacks are dropped.

        Raises:
            ConfigError: An axis or the mode is unknown.
        """
        if mode not in ("train", "prefill", "decode"):
            hint = did_you_mean(mode, ["train", "prefill", "decode"])
            raise ConfigError(f"unknown mode {mode!r}{hint} (known: train, prefill, decode)")
        table = {**ACTIVATION_AXES, **(DECODE_AXES if mode == "decode" else {})}
        spec = PartitionSpec(*_distinct([self._look_up(a, table, "activation") for a in axes]))
        if mesh is None:
            return spec
        return fit_spec(spec, shape, mesh)[0]

    def _look_up(self, name: str | None, table: dict[str, str | None], kind: str) -> MeshAxes:
        if name is None:
            return None
        if name in table:
            field = table[name]
            return None if field is None else getattr(self.axis, field)
        if name in self.axis.mesh_axes():
            return name
        field = name if name.endswith("_axis") else f"{name}_axis"
        if field in PartitionAxis.__dataclass_fields__:
            return getattr(self.axis, field)
        known = ", ".join([*table, *sorted(self.axis.mesh_axes())])
        raise ConfigError(
            f"unknown {kind} axis {name!r}{did_you_mean(name, table)} (known: {known})"
        )


def _distinct(axes: list[MeshAxes]) -> list[MeshAxes]:
    """Keep the first use of each mesh axis, because a spec can use an axis only once."""
    used: set[str] = set()
    result: list[MeshAxes] = []
    for entry in axes:
        names = split(entry)
        kept = tuple(n for n in names if n not in used)
        used.update(kept)
        result.append(kept[0] if len(kept) == 1 else kept or None)
    return result


def fit_spec(
    spec: PartitionSpec, shape: Sequence[int] | None, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, list[str]]:
    """Drop axes from a spec that a mesh lacks, or that do not divide a dimension.

    Mesh axes of size 1 are also dropped, so that equal placements have equal specs.

    Args:
        spec: One entry for each dimension, or fewer.
        shape: Sizes of the dimensions; None = do not check divisibility.
        mesh: Mesh of the array.

    Returns:
        The spec, and a message for each dimension that is replicated because it is indivisible.

    Raises:
        MeshError: The spec has more entries than the shape.
    """
    if shape is not None and len(spec) > len(shape):
        raise MeshError(
            f"partition spec {spec} has {len(spec)} entries for an array of {len(shape)} "
            f"dimensions {tuple(shape)}"
        )
    entries: list[MeshAxes] = []
    notes: list[str] = []
    for i, entry in enumerate(spec):
        names = tuple(n for n in split(entry) if mesh.shape.get(n, 1) > 1)
        ways = math.prod(mesh.shape[n] for n in names)
        if shape is not None and shape[i] % ways:
            notes.append(
                f"dimension {i} of {tuple(shape)} does not divide by {'×'.join(names)} = {ways}"
            )
            names = ()
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries), notes
