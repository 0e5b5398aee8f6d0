"""Slots that are split over devices: each writes what falls into its own part.

The partitioner would gather the cache for a `dynamic_update_slice` along a sharded dimension. Under
`shard_map` nothing is sent: the new token is on every device of the row already.

Legend: b batch, g kv heads, t slots, k numbers of a head, s new tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ed_layers.cache.codes import Codes, Numbers, map_slots
from ed_layers.cache.storage import Layer, of_scales, update_layer


def splits_slots(sharding: jax.sharding.Sharding | None) -> NamedSharding | None:
    """The sharding of [b, g, t, k], if it splits t; None otherwise."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > 2 and sharding.spec[2]:
        return sharding
    return None


def specs_of(numbers: Numbers, sharding: NamedSharding, *, lead: int) -> Any:
    """Partition specs of stored numbers that have `lead` axes in front of [b, g, t, k]."""
    front = (None,) * lead
    values = PartitionSpec(*front, *sharding.spec)
    if not isinstance(numbers, Codes):
        return values
    scales = of_scales(sharding)
    assert isinstance(scales, NamedSharding)
    return Codes(values, PartitionSpec(*front, *scales.spec))  # type: ignore[arg-type]


def first_slot(sharding: NamedSharding, local: int) -> jax.Array:
    """Number of the first of this device's `local` slots; inside `shard_map`."""
    return jax.lax.axis_index(sharding.spec[2]) * local


def write_split_slots(
    storage: Any, layer: Layer, new: Numbers, slot: jax.Array, sharding: NamedSharding
) -> Any:
    """As `write_slots`, for a cache whose slots are split over devices."""

    def update(numbers: Numbers, at: tuple[Layer, ...]) -> Numbers:
        def local(numbers: Numbers, new: Numbers, slot: jax.Array, *at: Any) -> Numbers:
            return map_slots(
                lambda array, block, axis: put(
                    array, block, at, axis, slot - first_slot(sharding, array.shape[axis])
                ),
                numbers,
                new,
            )

        b, g = sharding.spec[:2]
        new_specs = specs_of(
            new, NamedSharding(sharding.mesh, PartitionSpec(b, g, None, None)), lead=0
        )
        stored = specs_of(numbers, sharding, lead=len(at))
        scalar = PartitionSpec()
        return jax.shard_map(
            local,
            mesh=sharding.mesh,
            in_specs=(stored, new_specs, scalar, *(scalar for _ in at)),
            out_specs=stored,
            check_vma=False,
        )(numbers, new, slot, *(jnp.asarray(i) for i in at))

    return update_layer(storage, layer, update)


def put(array: jax.Array, block: jax.Array, at: tuple, axis: int, slot: jax.Array) -> jax.Array:
    """Write a block whose first slot is `slot` of this device, if that is one of its own.

    A single token overwrites its slot, or, elsewhere, some slot by what is there already. Several
    may reach over an edge: all slots of the layer are looked through.
    """
    size, count = array.shape[axis], block.shape[axis - len(at)]
    start: list[Any] = [*at, *[0] * (array.ndim - len(at))]
    block = block.reshape((1,) * len(at) + block.shape)
    if count == 1:
        mine = (slot >= 0) & (slot < size)
        start[axis] = jnp.clip(slot, 0, size - 1)
        before = jax.lax.dynamic_slice(array, start, block.shape)
        return jax.lax.dynamic_update_slice(array, jnp.where(mine, block, before), start)
    shape = (*block.shape[:axis], size, *block.shape[axis + 1 :])
    before = jax.lax.dynamic_slice(array, start, shape)
    from_block = jnp.arange(size) - slot
    taken = jnp.take(block, jnp.clip(from_block, 0, count - 1), axis=axis)
    mine = (from_block >= 0) & (from_block < count)
    mine = mine.reshape((size,) + (1,) * (array.ndim - 1 - axis))
    return jax.lax.dynamic_update_slice(array, jnp.where(mine, taken, before), start)
