"""What a layer needs kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCacheSpec:
    """Keys and values of one attention layer: what a token takes, and how long it is kept.

    Attributes:
        num_kv_heads, head_dim: heads, and numbers of a head's key.
        value_dim: numbers of a head's value; None = `head_dim`.
        window: tokens after which one is forgotten, itself included; None = all are kept.
        group: layers that are stored together and share page tables: "full", "window" or "cross"
            (keys and values of an encoder, written once). A window makes "full" a "window".
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    group: str = "full"

    def __post_init__(self) -> None:
        # One way to write each spec, so that equal layers compare equal.
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

#: What one layer keeps: one spec, or several where it has several memories (self- and
#: cross-attention of a decoder; attention and recurrence side by side).
LayerSpecs = Spec | tuple[Spec, ...]


def each(specs: LayerSpecs) -> tuple[Spec, ...]:
    """The specs of one layer as a tuple."""
    return specs if isinstance(specs, tuple) else (specs,)


def attention_specs(specs: Sequence[LayerSpecs]) -> list[LayerCacheSpec] | None:
    """The specs, if each layer has keys and values alone; None otherwise."""
    found = [spec for spec in specs if isinstance(spec, LayerCacheSpec)]
    return found if len(found) == len(specs) else None


def uniform(specs: Sequence[LayerSpecs]) -> LayerCacheSpec:
    """The one spec that all layers share.

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
