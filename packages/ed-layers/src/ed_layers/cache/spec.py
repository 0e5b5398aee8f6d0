"""The memory that a layer needs between steps, and the groups of layers that share a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCacheSpec:
    """Keys and values of one attention layer: the size of a token, and how long tokens are stored.

    Attributes:
        num_kv_heads, head_dim: number of heads, and numbers of a head's key.
        value_dim: numbers of a head's value; None = `head_dim`.
        window: number of latest tokens that are stored; None = all.
        group: layers that are stored together and share page tables: "full", "window" or "cross"
            (keys and values of an encoder, written once). A window changes "full" to "window".
            Layers of other sizes have a group of another name (OpenELM).
        values_in_keys: a value is the first `value_dim` numbers of its key, so only keys are
            stored. The compressed cache of multi-head latent attention (DeepSeek-V2, 2024) is
            `LayerCacheSpec(1, 512 + 64, value_dim=512, values_in_keys=True)`.

    Raises:
        ValueError: a value of `values_in_keys` is wider than its key.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    group: str = "full"
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        if self.values_in_keys and self.values > self.head_dim:
            raise ValueError(
                f"value_dim={self.value_dim} is more than the head_dim={self.head_dim} numbers of "
                "a key, but values_in_keys=True reads values out of keys"
            )
        # Each spec has one normal form, so that equal layers compare equal.
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)
        if self.window is not None and self.group == "full":
            object.__setattr__(self, "group", "window")

    @property
    def values(self) -> int:
        """Numbers of a head's value."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True)
class StateSpec:
    """One array of a recurrent layer: `shape` per row, without the batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class RecurrentSpec:
    """The state of one recurrent layer, a fixed number of arrays per row (Mamba, gated deltas)."""

    states: tuple[StateSpec, ...]
    group: str = "recurrent"


Spec = LayerCacheSpec | RecurrentSpec

#: The memory of one layer: one spec, or several specs (self- and cross-attention of a decoder;
#: parallel attention and recurrence).
LayerSpecs = Spec | tuple[Spec, ...]

#: (group, index of each layer of the model among the layers of the group; -1 = not in the group).
Table = tuple[tuple[str, tuple[int, ...]], ...]


def flatten_specs(*specs: LayerSpecs) -> tuple[Spec, ...]:
    """Return the memory of several parts of one layer."""
    return tuple(spec for part in specs for spec in (part if isinstance(part, tuple) else (part,)))


def group_layers(specs: Sequence[LayerSpecs]) -> tuple[Table, dict[str, list[Spec]]]:
    """Assign the layers to groups.

    Returns:
        The table of the groups, and the specs of each group's layers.

    Raises:
        ValueError: the specs of a group differ, or a layer has two specs of one group.
    """
    groups: dict[str, list[Spec]] = {}
    table: dict[str, list[int]] = {}
    for layer, layer_specs in enumerate(specs):
        for spec in flatten_specs(layer_specs):
            row = table.setdefault(spec.group, [-1] * len(specs))
            members = groups.setdefault(spec.group, [])
            if row[layer] >= 0:
                raise ValueError(f"layer {layer} has two specs of group {spec.group!r}")
            if members and members[0] != spec:
                raise ValueError(
                    f"layers of group {spec.group!r} differ: {members[0]} and {spec}; use "
                    "a separate group for each kind"
                )
            row[layer] = len(members)
            members.append(spec)
    return tuple((group, tuple(row)) for group, row in table.items()), groups


def uniform(specs: Sequence[LayerSpecs]) -> LayerCacheSpec:
    """Return the spec that all layers share.

    Raises:
        ValueError: the layers differ.
    """
    distinct = set(specs)
    spec = next(iter(distinct), None)
    if len(distinct) != 1 or not isinstance(spec, LayerCacheSpec):
        raise ValueError(
            "this cache stores keys and values of layers of one shape, but the model has "
            f"{len(distinct)} kinds: {distinct}; HybridCache stores layers that differ"
        )
    return spec
