"""Names of axes: of the device mesh, of parameters, of activations. Imports nothing heavy.

A parameter says what its dimensions mean (`("embed", "heads")`); `PartitionAxis` says over which
mesh axes each meaning is split. `ed_infra.partition` joins the two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

#: Data, fully sharded data, expert, tensor and sequence parallelism: the axes of a mesh, in order.
AXIS_NAMES: tuple[str, ...] = ("dp", "fsdp", "ep", "tp", "sp")

#: One mesh axis, several (the dimension is split over their product), or none (replicated).
MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class PartitionAxis:
    """Over which mesh axes each kind of dimension is split.

    Fields without a prefix hold for training and prefill, `decode_*` fields for steps of one token
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
                object.__setattr__(self, field.name, tuple(value))

    def renamed(self, old: str, new: str) -> PartitionAxis:
        """Return a copy in which another mesh axis takes the place of `old`."""

        def change(value: MeshAxes) -> MeshAxes:
            if isinstance(value, tuple):
                return tuple(new if name == old else name for name in value)
            return new if value == old else value

        names = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(self, **{n: change(getattr(self, n)) for n in names})  # type: ignore

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }


#: Logical axis of a parameter -> the field of `PartitionAxis` that places it.
PARAM_AXES: dict[str, str | None] = {
    "embed": "fully_sharded_data_parallel_axis",
    "vocab": "vocab_axis",
    "heads": "head_axis",
    "kv_heads": "kv_head_axis",
    "mlp": "mlp_intermediate_axis",
    "expert": "expert_axis",
    "head_dim": None,
    "norm": None,
    "rank": None,
}

#: Logical axis of an activation -> the field of `PartitionAxis` that places it in training.
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

#: The same for one-token decoding, where it differs.
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
