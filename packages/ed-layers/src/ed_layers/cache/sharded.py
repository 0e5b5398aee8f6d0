"""Writes of tokens into rows of slots, which may be split over devices.

XLA's partitioner would gather a cache to write along a sharded dimension. `shard_map` needs no
communication: the new tokens are already on every device of their row, and each device writes the
tokens of its slots.

Legend: b batch, g kv heads, t slots, k numbers of a head, s new tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ed_layers import native
from ed_layers.cache.codes import Codes, Numbers, encode_numbers, map_slots
from ed_layers.cache.storage import At, Layer, sharding_of_scales


def splits_slots(sharding: jax.sharding.Sharding | None) -> NamedSharding | None:
    """Return the sharding of [b, g, t, k] if it splits t, otherwise None."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > 2 and sharding.spec[2]:
        return sharding
    return None


def get_partition_specs(numbers: Numbers, sharding: NamedSharding, *, lead: int) -> Any:
    """Return the partition specs of stored numbers with `lead` axes before [b, g, t, k]."""
    front = (None,) * lead
    values = PartitionSpec(*front, *sharding.spec)
    if not isinstance(numbers, Codes):
        return values
    scales = sharding_of_scales(sharding, 4, 2)
    assert isinstance(scales, NamedSharding)
    return Codes(values, PartitionSpec(*front, *scales.spec))  # type: ignore[arg-type]


def first_slot(sharding: NamedSharding, local: int) -> jax.Array:
    """Return the first slot of this device, which has `local` slots; inside `shard_map`."""
    return jax.lax.axis_index(sharding.spec[2]) * local


def write_rows(
    numbers: Numbers,
    at: At,
    new: Float[Array, "b s g k"],
    slots: Int[Array, "b s"],
    sharding: NamedSharding | None,
) -> Numbers:
    """Write tokens of rows into one layer [b, g, t, k], in place.

    Args:
        slots: slot of each token; a token whose slot does not exist is dropped.
        sharding: sharding of the layer if slots are split over devices.
    """
    if sharding is None:
        return scatter(numbers, new, slots, *at)

    def local(numbers: Numbers, new: jax.Array, slots: jax.Array, *at: Layer) -> Numbers:
        return scatter(numbers, new, slots - first_slot(sharding, numbers.shape[-2]), *at)

    rows, heads = sharding.spec[:2]
    stored = get_partition_specs(numbers, sharding, lead=len(at))
    input_specs = (
        PartitionSpec(rows, None, heads),
        PartitionSpec(rows),
        *(PartitionSpec() for _ in at),
    )
    write = jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(stored, *input_specs),
        out_specs=stored,
        check_vma=False,
    )
    return write(numbers, new, slots, *(jnp.asarray(layer) for layer in at))


def scatter(numbers: Numbers, new: jax.Array, slots: jax.Array, *at: Layer) -> Numbers:
    """Do the work of `write_rows` on one device, or with slots that are not split."""
    lead = len(at)
    indices = jnp.stack([*(jnp.broadcast_to(layer, slots.shape) for layer in at), slots], axis=-1)

    def put(array: jax.Array, tokens: jax.Array, slot_axis: int) -> jax.Array:
        if native.rows.puts_natively(array):
            return put_rows(array, tokens, slots, at)
        indexed = (*range(lead), slot_axis)
        # Rows are a batching dimension, so that rows on several devices are written in place.
        dims = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(2, 3),
            inserted_window_dims=indexed,
            scatter_dims_to_operand_dims=indexed,
            operand_batching_dims=(lead,),
            scatter_indices_batching_dims=(0,),
        )
        drop = jax.lax.GatherScatterMode.FILL_OR_DROP
        return jax.lax.scatter(array, indices, tokens, dims, mode=drop)

    return map_slots(put, numbers, encode_numbers(new, numbers))


def put_rows(array: jax.Array, tokens: jax.Array, slots: Int[Array, "b s"], at: At) -> jax.Array:
    """Do the work of `scatter` for numbers [*lead, b, g, t, k] in the native library."""
    b, g, t, k = array.shape[len(at) :]
    layer = at[0] if at else 0
    rows = (layer * b + jnp.arange(b))[:, None, None] * g + jnp.arange(g)
    index = jnp.where((slots >= 0) & (slots < t), slots, -1)[..., None]
    index = jnp.where(index < 0, -1, rows * t + index)
    return native.rows.put_native_rows(
        array, index.reshape(-1), tokens.reshape(-1, k), axes=len(at) + 3
    )
