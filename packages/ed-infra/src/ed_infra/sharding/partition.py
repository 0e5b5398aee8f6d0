"""`PartitionManager`: from logical axes to partition specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.sharding import places
from ed_infra.sharding.axes import (
    ACTIVATION_AXES,
    DECODE_AXES,
    PARAM_AXES,
    PartitionAxis,
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
        sizes = None if mesh is None else mesh.shape
        return PartitionSpec(
            *places.get_parameter_axes(self.axis, axes, shape, sizes, self.expert_axes)
        )

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
        mesh_axes = [places.look_up(self.axis, name, table, "activation") for name in axes]
        spec = PartitionSpec(*places.distinct(mesh_axes))
        if mesh is None:
            return spec
        return fit_spec(spec, shape, mesh)[0]


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
    entries, notes = places.fit_places(tuple(spec), shape, mesh.shape)
    return PartitionSpec(*entries), notes
