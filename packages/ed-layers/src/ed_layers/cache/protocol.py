"""What attention expects of a cache, and the storage that every cache of keys and values shares.

Legend: L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
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


@dataclass(frozen=True)
class Stored:
    """What attention reads of one layer of a contiguous cache.

    Attributes:
        k, v: [b, g, t, k] and [b, g, t, d].
        mask_info: who may attend to which slot.
        layout: how the cache stores its layers; where they are leaves, reading one copies nothing.
    """

    k: jax.Array
    v: jax.Array
    mask_info: MaskInfo
    layout: Layout


class Cache(Protocol):
    """A pytree that a step donates and gets back; a scan over layers carries it."""

    def update(
        self: CacheT,
        layer: Layer,
        kv: tuple[jax.Array, jax.Array] | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[CacheT, Any]:
        """Store this step's keys and values of one layer, and give what its attention reads.

        Args:
            layer: which layer of the model.
            kv: [b, s, g, k] and [b, s, g, d]; None where a layer only reads.
            mask_info: who may attend to whom, as `begin` gave it.
            ragged: the flat batch of a serving step, for caches of pages.
            group: which kind of layer it is; see `attend`.
        """
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
