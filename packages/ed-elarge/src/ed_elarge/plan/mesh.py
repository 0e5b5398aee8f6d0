"""The mesh of a plan, and the bytes of an array on one device."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ed_infra.config.fields import FIELDS
from ed_infra.errors import ConfigError
from ed_infra.sharding import places
from ed_infra.sharding.axes import (
    ACTIVATION_AXES,
    MeshAxes,
    PartitionAxis,
    resolve_axis_dims,
    split_mesh_axes,
    total_sizes,
)

from ed_elarge.config.run_config import RunConfig
from ed_elarge.plan.tensors import PlanTensor


@dataclass(frozen=True)
class PlanMesh:
    """Sizes of the mesh axes, and the dimensions that they split.

    Attributes:
        sizes: mesh axis -> number of devices along the axis.
        axis: kind of dimension -> mesh axes.
        expert_axes: further mesh axes of experts.
        rules: pairs (pattern, mesh axes of one layer's dimensions) over names of parameters, which
            precede the logical axes.
    """

    sizes: Mapping[str, int]
    axis: PartitionAxis
    expert_axes: tuple[str, ...]
    rules: tuple[tuple[str, tuple[MeshAxes, ...]], ...] = ()

    def __post_init__(self) -> None:
        # Places of parameters, which a plan needs many times.
        object.__setattr__(self, "_known", {})

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    def ways(self, axes: MeshAxes) -> int:
        """Return the number of parts over mesh axes."""
        return math.prod(self.sizes.get(name, 1) for name in split_mesh_axes(axes))

    def parameter(self, tensor: PlanTensor) -> tuple[MeshAxes, ...]:
        """Return the mesh axes of each dimension of a parameter."""
        stored_axes: dict[PlanTensor, tuple[MeshAxes, ...]] = vars(self)["_known"]
        if tensor not in stored_axes:
            stored_axes[tensor] = self._place(tensor)
        return stored_axes[tensor]

    def _place(self, tensor: PlanTensor) -> tuple[MeshAxes, ...]:
        mesh_axes = self._rule(tensor.name.replace("*", "0"))
        if mesh_axes is None:
            mesh_axes = places.get_parameter_axes(
                self.axis, tensor.axes, tensor.shape, self.sizes, self.expert_axes
            )
        return tuple(places.fit_places(mesh_axes, tensor.shape, self.sizes)[0])

    def _rule(self, name: str) -> Sequence[MeshAxes] | None:
        slashed = name.replace(".", "/")
        for pattern, spec in self.rules:
            if re.search(pattern, name) or re.search(pattern, slashed):
                return spec
        return None

    def shard(self, tensor: PlanTensor) -> int:
        """Return the number of values of a parameter on one device."""
        parts = math.prod(self.ways(entry) for entry in self.parameter(tensor))
        return tensor.size // parts

    def count_gathered_values(self, tensor: PlanTensor) -> int:
        """Return the number of values of one layer's parameter in a product.

        A product reads the whole parameter, except along the axes of tensor parallelism, which also
        split its result, and of experts.
        """
        split_axes = {
            name for field in _KEPT for name in split_mesh_axes(getattr(self.axis, field))
        }
        split_axes |= {*self.expert_axes} if tensor.axes[:1] == ("expert",) else set()
        parts = math.prod(
            self.ways(tuple(name for name in split_mesh_axes(entry) if name in split_axes))
            for entry in self.parameter(tensor)
        )
        return math.prod(tensor.shape) // parts

    def activation(self, axes: Sequence[str | None], shape: Sequence[int]) -> int:
        """Return the number of values of an activation on one device."""
        mesh_axes = [places.look_up(self.axis, a, ACTIVATION_AXES, "activation") for a in axes]
        fitted = places.fit_places(places.distinct(mesh_axes), shape, self.sizes)[0]
        return math.prod(shape) // math.prod(self.ways(entry) for entry in fitted)


#: Fields of `PartitionAxis` whose mesh axes stay split while a layer computes.
_KEPT = (
    "tensor_parallel_axis",
    "head_axis",
    "kv_head_axis",
    "mlp_intermediate_axis",
    "vocab_axis",
    "expert_axis",
)


def build_mesh(run: RunConfig, devices: int, dims: Sequence[int] | None = None) -> PlanMesh:
    """Return the mesh of a run on a number of devices.

    Args:
        run: the run.
        devices: number of devices.
        dims: sizes of the axes instead of those of the run.

    Raises:
        ConfigError: a rule of `partition_rules` names a layer by its number.
        MeshError: the sizes do not fit the number of devices.
    """
    fields = run.execution_fields()
    names = tuple(fields["sharding_axis_names"])
    if dims is None:
        axis_dims, slices = fields["sharding_axis_dims"], fields["sharding_dcn_axis_dims"]
        dims = resolve_axis_dims(
            total_sizes(axis_dims, slices) if slices else axis_dims, devices, names
        )
    sizes = dict(zip(names, dims, strict=True))
    axis = fields["partition_axis"].on(names, sizes)
    if fields["sequence_axis_name"] != FIELDS["sequence_axis_name"].default:
        axis = axis.rename_axis(axis.sequence_parallel_axis, fields["sequence_axis_name"])
    bound = {
        axis.fully_sharded_data_parallel_axis: "fsdp_is_ep_bound",
        axis.sequence_parallel_axis: "sp_is_ep_bound",
        axis.tensor_parallel_axis: "use_expert_tensor_mode",
    }
    more = tuple(name for name, field in bound.items() if fields[field])
    rules = fields["sharding_rules"] or ()
    for pattern, _ in rules:
        if re.search(r"\d", pattern):
            raise ConfigError(
                f"elarge plan knows rules for all layers, and {pattern!r} in "
                "sharding.partition_rules contains a number: write one rule for all layers"
            )
    return PlanMesh(sizes, axis, more, tuple(rules))
