"""What attention expects of a cache, and the storage that every cache of keys and values shares.

Legend: L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ed_layers.cache.ragged import RaggedBatch

Layout = Literal["stacked", "leaves"]
Layer = int | Int[Array, ""]


@dataclass(frozen=True)
class LayerCacheSpec:
    """What one attention layer needs kept: `num_kv_heads` heads of `head_dim` per token."""

    num_kv_heads: int
    head_dim: int


CacheT = TypeVar("CacheT", bound="Cache")


class Cache(Protocol):
    """A pytree that a step donates and gets back; a scan over layers carries it."""

    def write(self: CacheT, layer: Layer, kv: Any, ragged: RaggedBatch | None) -> CacheT:
        """Store this step's keys and values of one layer."""
        ...

    def read(self, layer: Layer, ragged: RaggedBatch | None) -> Any:
        """Everything stored for one layer, in the form its attention mechanism takes."""
        ...


# One array [L, ...] for scanned depth (a scan carries it and indexes it by a traced layer), or a
# tuple of L arrays for unrolled depth: slicing a stack inside jit copies the slice.
PerLayer = jax.Array | tuple[jax.Array, ...]


def allocate(num_layers: int, layout: Layout, make: Callable[[tuple[int, ...]], jax.Array]):
    """Allocate per-layer storage.

    Args:
        num_layers: L.
        layout: "stacked" for scanned depth, "leaves" for unrolled depth.
        make: makes an array, given the leading dims (`(L,)` or `()`).
    """
    if layout == "stacked":
        return make((num_layers,))
    return tuple(make(()) for _ in range(num_layers))


def layer_of(storage: PerLayer, layer: Layer) -> jax.Array:
    """The array of one layer."""
    array, at = locate(storage, layer)
    return (
        jax.lax.dynamic_index_in_dim(array, jnp.asarray(at[0]), 0, keepdims=False) if at else array
    )


def locate(storage: PerLayer, layer: Layer) -> tuple[jax.Array, tuple[Layer, ...]]:
    """An array and the leading index at which the layer is in it: `(layer,)` or `()`."""
    if isinstance(storage, tuple):
        return storage[static_layer(layer)], ()
    return storage, (layer,)


def update_layer(
    storage: PerLayer, layer: Layer, update: Callable[[jax.Array, tuple], jax.Array]
) -> PerLayer:
    """Replace one layer by `update(array, leading_index)`.

    `update` gets the whole array and the index of the layer in it (`(layer,)` or `()`), so that it
    writes in place instead of taking the layer out and putting it back.
    """
    if isinstance(storage, tuple):
        at = static_layer(layer)
        return (*storage[:at], update(storage[at], ()), *storage[at + 1 :])
    return update(storage, (layer,))


def static_layer(layer: Layer) -> int:
    """The layer as a Python int; unrolled storage cannot be indexed by a traced number."""
    if isinstance(layer, int):
        return layer
    raise TypeError(
        "this cache keeps one array per layer, for unrolled models, but a scanned model reads it: "
        "create it by the model's own init_cache()"
    )
