"""Arrays of many layers: stacked for scanned depth, apart for unrolled depth.

Legend: L layers, b batch, g kv heads, t slots, k numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ed_layers.cache.codes import Codes, Format, Numbers, map_slots

Layout = Literal["stacked", "leaves"]
Layer = int | Int[Array, ""]

# One array [L, ...] for scanned depth (a scan carries it and indexes it by a traced layer), or a
# tuple of L arrays for unrolled depth: slicing a stack inside jit copies the slice.
PerLayer = Numbers | tuple[Numbers, ...]


def allocate(num_layers: int, layout: Layout, make: Callable[[tuple[int, ...]], Any]) -> Any:
    """Allocate per-layer storage.

    Args:
        num_layers: L.
        layout: "stacked" for scanned depth, "leaves" for unrolled depth.
        make: makes an array, given the leading dims (`(L,)` or `()`).
    """
    if layout == "stacked":
        return make((num_layers,))
    return tuple(make(()) for _ in range(num_layers))


def allocate_slots(
    num_layers: int,
    shape: tuple[int, int, int, int],
    *,
    layout: Layout,
    dtype: Any,
    format: Format | None,
    sharding: jax.sharding.Sharding | None,
) -> PerLayer:
    """Allocate the keys, or the values, of all layers: zeros [b, g, t, k] for each."""
    return allocate(
        num_layers, layout, lambda lead: make_slots(lead, shape, dtype, format, sharding)
    )


def make_slots(
    lead: tuple[int, ...],
    shape: tuple[int, int, int, int],
    dtype: Any,
    format: Format | None,
    sharding: jax.sharding.Sharding | None,
) -> Numbers:
    """Zeros for keys or values [*lead, b, g, t, k], placed; codes and scales if quantized."""
    if format is None:
        return place(jnp.zeros((*lead, *shape), dtype), sharding, stacked=bool(lead))
    b, g, t, k = shape
    scale = jnp.zeros((*lead, b, g, format.groups(k), t), jnp.float32)
    return Codes(
        place(jnp.zeros((*lead, *shape), format.dtype), sharding, stacked=bool(lead)),
        place(scale, of_scales(sharding), stacked=bool(lead)),
    )


def of_scales(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Sharding of [b, g, n, t] where [b, g, t, k] is sharded so."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    b, g, t, _ = (*sharding.spec, *(None,) * 4)[:4]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(b, g, None, t))


def place(array: jax.Array, sharding: jax.sharding.Sharding | None, *, stacked: bool) -> jax.Array:
    """Put per-layer storage on its devices; the layer axis of a stack is never sharded."""
    if sharding is None:
        return array
    if stacked and isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.device_put(array, sharding)


def layout_of(storage: PerLayer) -> Layout:
    """How the layers are stored."""
    return "leaves" if isinstance(storage, tuple) else "stacked"


def locate(storage: Any, layer: Layer) -> tuple[Any, tuple[Layer, ...]]:
    """The numbers, and the leading index at which the layer is in them: `(layer,)` or `()`."""
    if isinstance(storage, tuple):
        return storage[static_layer(layer)], ()
    return storage, (layer,)


def take_layer(numbers: Any, at: tuple[Layer, ...]) -> Any:
    """The layer at a leading index, as `locate` gave it."""
    if not at:
        return numbers
    index = jnp.asarray(at[0])
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False), numbers
    )


def layer_of(storage: Any, layer: Layer) -> Any:
    """The numbers of one layer."""
    return take_layer(*locate(storage, layer))


def update_layer(
    storage: Any, layer: Layer, update: Callable[[Any, tuple[Layer, ...]], Any]
) -> Any:
    """Replace one layer by `update(numbers, leading_index)`.

    `update` gets the whole array and the index of the layer in it (`(layer,)` or `()`), so that it
    writes in place instead of taking the layer out and putting it back.
    """
    if isinstance(storage, tuple):
        at = static_layer(layer)
        return (*storage[:at], update(storage[at], ()), *storage[at + 1 :])
    return update(storage, (layer,))


def write_slots(storage: Any, layer: Layer, new: Numbers, slot: Any) -> Any:
    """Write new slots [b, g, s, k] of one layer in place, from `slot` on.

    Args:
        new: in the storage's format, see `encode`.
        slot: the first, a number or a traced scalar.
    """

    def update(numbers: Numbers, at: tuple[Layer, ...]) -> Numbers:
        def put(array: jax.Array, block: jax.Array, axis: int) -> jax.Array:
            start: list[Any] = [*at, *[0] * (array.ndim - len(at))]
            start[axis] = slot
            block = block.reshape((1,) * len(at) + block.shape)
            return jax.lax.dynamic_update_slice(array, block, start)

        return map_slots(put, numbers, new)

    return update_layer(storage, layer, update)


def static_layer(layer: Layer) -> int:
    """The layer as a Python int; unrolled storage cannot be indexed by a traced number."""
    if isinstance(layer, int):
        return layer
    raise TypeError(
        "this cache keeps one array per layer, for unrolled models, but a scanned model reads it: "
        "create it by the model's own init_cache()"
    )
