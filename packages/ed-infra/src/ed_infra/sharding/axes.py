"""Names of axes of the device mesh, parameters and activations. This module does not import jax.

A parameter declares its logical axes (`("embed", "heads")`). `PartitionAxis` maps logical axes to
mesh axes. `ed_infra.sharding.partition` combines both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ed_infra.errors import ConfigError, MeshError, did_you_mean

#: Data, fully sharded data, expert, tensor and sequence parallelism: the axes of a mesh, in order.
AXIS_NAMES: tuple[str, ...] = ("dp", "fsdp", "ep", "tp", "sp")

#: One mesh axis, several (the dimension is split over their product), or none (replicated).
MeshAxes = str | tuple[str, ...] | None

#: A logical axis for each dimension of an array; None for a dimension that is never sharded.
LogicalAxes = tuple[str | None, ...]


def split_mesh_axes(axes: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of one dimension as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def total_sizes(dims: Sequence[int], slices: Sequence[int] | None) -> list[int]:
    """Return the devices along each axis; the product is negative if one of two sizes is -1."""
    return [i * o for i, o in zip(dims, slices or [1] * len(dims), strict=True)]


def check_axis_names(names: Sequence[str]) -> None:
    """Raise MeshError for empty or duplicate names of mesh axes."""
    for name in names:
        if not name or list(names).count(name) > 1:
            fault = "occurs twice" if name else "is empty"
            raise MeshError(f"mesh axis names {tuple(names)}: a name {fault}")


def check_sizes(dims: Sequence[int], names: Sequence[str] | None = None) -> None:
    """Raise MeshError for invalid sizes of mesh axes.

    Args:
        dims: Sizes of at least 1; one may be -1, for the remaining devices.
        names: Names for the message.
    """
    axis_sizes = ", ".join(
        f"{n}={d}" if n else str(d) for n, d in zip(names or [""] * len(dims), dims, strict=False)
    )
    if any(d < 1 and d != -1 for d in dims):
        raise MeshError(f"mesh axes ({axis_sizes}): a size is at least 1, or -1 for the rest")
    free = list(dims).count(-1)
    if free > 1:
        raise MeshError(f"mesh axes ({axis_sizes}): only one axis can be -1, {free} are")


def resolve_axis_dims(
    dims: Sequence[int], device_count: int, names: Sequence[str] = AXIS_NAMES
) -> tuple[int, ...]:
    """Replace `-1` in `dims` by the number of remaining devices.

    Without `-1`, the product may be smaller than `device_count`: the mesh then uses the first
    devices.

    Raises:
        MeshError: There are two `-1`, a size is below 1, or the sizes do not divide the number of
            devices. The message contains the calculation.
    """
    dims = tuple(int(d) for d in dims)
    if len(dims) != len(names):
        raise MeshError(
            f"{len(dims)} axis dims {dims} for {len(names)} axis names {tuple(names)}: "
            "set one size for each name"
        )
    axis_sizes = ", ".join(f"{n}={d}" for n, d in zip(names, dims, strict=True))
    check_sizes(dims, names)
    fixed = math.prod(d for d in dims if d != -1)
    product = " × ".join(str(d) for d in dims if d != -1)
    if -1 not in dims:
        if fixed > device_count:
            raise MeshError(
                f"mesh axes ({axis_sizes}) need {product} = {fixed} devices, but there are "
                f"{device_count}: make the product at most {device_count}, or one axis -1"
            )
        return dims
    if device_count % fixed:
        divisors = [d for d in range(1, device_count + 1) if device_count % d == 0]
        raise MeshError(
            f"mesh axes ({axis_sizes}): {device_count} devices / ({product}) = "
            f"{device_count / fixed:g} is not whole, so -1 cannot be resolved: the other sizes "
            f"must multiply to one of {', '.join(map(str, divisors))}"
        )
    return tuple(device_count // fixed if d == -1 else d for d in dims)


@dataclasses.dataclass(frozen=True)
class PartitionAxis:
    """The mesh axes over which each kind of dimension is split.

    Fields without a prefix apply to training and prefill, `decode_*` fields to steps with one token
    for each sequence.
    """

    data_parallel_axis: str = "dp"
    fully_sharded_data_parallel_axis: str = "fsdp"
    tensor_parallel_axis: str = "tp"
    sequence_parallel_axis: str = "sp"
    expert_parallel_axis: str = "ep"
    batch_axis: MeshAxes = ("fsdp", "dp")
    sequence_axis: MeshAxes = "sp"
    query_sequence_axis: MeshAxes = "sp"
    head_axis: MeshAxes = "tp"
    kv_head_axis: MeshAxes = "tp"
    key_sequence_axis: MeshAxes = "sp"
    hidden_state_axis: MeshAxes = "tp"
    mlp_intermediate_axis: MeshAxes = "tp"
    vocab_axis: MeshAxes = "tp"
    expert_axis: MeshAxes = "ep"
    expert_gate_axis: MeshAxes = None
    attention_dim_axis: MeshAxes = None
    attention_kv_dim_axis: MeshAxes = None
    bias_head_sequence_axis: MeshAxes = None
    bias_key_sequence_axis: MeshAxes = None
    decode_batch_axis: MeshAxes = ("fsdp", "dp")
    decode_query_sequence_axis: MeshAxes = None
    decode_head_axis: MeshAxes = "tp"
    decode_kv_head_axis: MeshAxes = "tp"
    decode_key_sequence_axis: MeshAxes = "sp"
    decode_attention_dim_axis: MeshAxes = None
    decode_attention_kv_dim_axis: MeshAxes = None

    def __post_init__(self) -> None:
        # Lists come from JSON and YAML; the object must stay hashable.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, value := tuple(value))
            is_name_tuple = isinstance(value, tuple) and all(
                isinstance(name, str) for name in value
            )
            if not (value is None or isinstance(value, str) or is_name_tuple):
                raise ConfigError(
                    f"partition_axis: {field.name} = {value!r}: the name of a mesh axis, several "
                    "names, or None"
                )

    def rename_axis(self, old: str, new: str) -> PartitionAxis:
        """Return a copy with another mesh axis instead of `old`."""

        def change(value: MeshAxes) -> MeshAxes:
            if isinstance(value, tuple):
                return tuple(new if name == old else name for name in value)
            return new if value == old else value

        names = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(self, **{n: change(getattr(self, n)) for n in names})

    def mesh_axes(self) -> set[str]:
        """Return all mesh axes of the fields."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return {name for value in values for name in split_mesh_axes(value)}

    def on(
        self, names: Sequence[str], sizes: Mapping[str, int] | Sequence[int] = ()
    ) -> PartitionAxis:
        """Return the axes with the names of a mesh.

        Five other names replace (dp, fsdp, ep, tp, sp) in this order. An axis of `AXIS_NAMES` that
        the mesh lacks splits no dimension.

        Args:
            names: Names of the mesh axes.
            sizes: Sizes of the mesh axes, in the same order or by name; an axis of size 1 may be
                unused.

        Raises:
            ConfigError: The mesh lacks an axis of a field, or no field uses an axis of the mesh, so
                that all arrays would be replicated along it.
        """
        result = self
        if len(names) == len(AXIS_NAMES):
            for old, new in zip(AXIS_NAMES, names, strict=True):
                if old not in names and new not in AXIS_NAMES:
                    result = result.rename_axis(old, new)
        used = result.mesh_axes()
        for axis in sorted(used - {*names, *AXIS_NAMES}):
            hint = did_you_mean(axis, names)
            raise ConfigError(
                f"partition_axis names {axis!r}, but the mesh has no such axis{hint} "
                f"(axes: {', '.join(names)})",
                field="partition_axis",
            )
        by_name = sizes if isinstance(sizes, Mapping) else dict(zip(names, sizes, strict=False))
        for axis in names:
            if axis not in used and by_name.get(axis, 0) != 1:
                raise ConfigError(
                    f"no dimension is split over the mesh axis {axis!r}: assign one in "
                    f"partition_axis (such as head_axis={axis!r}), or name five axes, which stand "
                    f"for {', '.join(AXIS_NAMES)} in that order",
                    field="sharding_axis_names",
                )
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }


#: Logical axis of a parameter -> its field of `PartitionAxis`.
PARAM_AXES: dict[str, str | None] = {
    "embed": "fully_sharded_data_parallel_axis",
    "vocab": "vocab_axis",
    "heads": "head_axis",
    "kv_heads": "kv_head_axis",
    "mlp": "mlp_intermediate_axis",
    "expert": "expert_axis",
    "expert_gate": "expert_gate_axis",
    "head_dim": None,
    "norm": None,
    "rank": None,
}

#: Logical axis of an activation -> its field of `PartitionAxis` in training.
ACTIVATION_AXES: dict[str, str | None] = {
    "batch": "batch_axis",
    "sequence": "sequence_axis",
    "query_sequence": "query_sequence_axis",
    "key_sequence": "key_sequence_axis",
    "hidden": None,
    "hidden_state": "hidden_state_axis",
    "heads": "head_axis",
    "kv_heads": "kv_head_axis",
    "mlp": "mlp_intermediate_axis",
    "vocab": "vocab_axis",
    "expert": "expert_axis",
    "expert_gate": "expert_gate_axis",
    "head_dim": "attention_dim_axis",
    "kv_head_dim": "attention_kv_dim_axis",
}

#: Different fields in one-token decoding.
DECODE_AXES: dict[str, str | None] = {
    "batch": "decode_batch_axis",
    "sequence": "decode_query_sequence_axis",
    "query_sequence": "decode_query_sequence_axis",
    "key_sequence": "decode_key_sequence_axis",
    "heads": "decode_head_axis",
    "kv_heads": "decode_kv_head_axis",
    "head_dim": "decode_attention_dim_axis",
    "kv_head_dim": "decode_attention_kv_dim_axis",
}

#: Field that no layer reads -> what to set instead.
_UNREAD_AXES: dict[str, str] = {
    **dict.fromkeys(
        ("bias_head_sequence_axis", "bias_key_sequence_axis"),
        "biases of attention are computed with the scores, and follow head_axis: omit it",
    ),
    "hidden_state_axis": (
        "it splits only the arrays inputs_embeds and encoder_outputs of a batch, and the stream "
        "between layers has all features on each device: set sequence_axis to split the stream"
    ),
}
#: Fields of the arrays inside attention, whose sharding is otherwise a choice of the compiler.
CONSTRAINED_AXES: tuple[str, ...] = (
    *("query_sequence_axis", "key_sequence_axis", "attention_dim_axis", "attention_kv_dim_axis"),
    *("decode_query_sequence_axis", "decode_attention_dim_axis", "decode_attention_kv_dim_axis"),
)
#: Field that only experts read -> the fields that split the other dimensions of its kind.
_KINDS_OF_AXES: dict[str, tuple[str, ...]] = {
    "data_parallel_axis": ("batch_axis", "decode_batch_axis"),
    "expert_parallel_axis": ("expert_axis",),
    "tensor_parallel_axis": ("head_axis", "kv_head_axis", "mlp_intermediate_axis", "vocab_axis"),
    "sequence_parallel_axis": ("sequence_axis",),
}


def find_idle_axes(axis: PartitionAxis, *, constrained: bool) -> Iterator[tuple[str, str]]:
    """Yield the fields that differ from their default without an effect, and what to set instead.

    Args:
        axis: the mesh axes.
        constrained: `use_sharding_constraint` of the configuration.
    """
    for field in dataclasses.fields(axis):
        name, value = field.name, getattr(axis, field.name)
        if value == field.default:
            continue
        if name in _UNREAD_AXES:
            yield name, _UNREAD_AXES[name]
        elif name in CONSTRAINED_AXES and not constrained:
            yield name, "the compiler places this array: set use_sharding_constraint: true as well"
        elif name in _KINDS_OF_AXES:
            related_fields = _KINDS_OF_AXES[name]
            if not any(
                value in split_mesh_axes(getattr(axis, field_name)) for field_name in related_fields
            ):
                listed = " and ".join(related_fields)
                yield name, f"only the mesh of experts reads it: set {listed} as well"
