"""Slots that are split over devices: each device writes the tokens that fall into its own part.

The partitioner would gather the cache to write along a sharded dimension. Under `shard_map` nothing
is sent: the new tokens are on every device of their row already.

Legend: b batch, g kv heads, t slots, k numbers of a head, s new tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ed_layers.cache.codes import Codes, Numbers
from ed_layers.cache.storage import At, Layer, sharding_of_scales, write_rows


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
    scales = sharding_of_scales(sharding, 4, 2)
    assert isinstance(scales, NamedSharding)
    return Codes(values, PartitionSpec(*front, *scales.spec))  # type: ignore[arg-type]


def first_slot(sharding: NamedSharding, local: int) -> jax.Array:
    """Number of the first of this device's `local` slots; inside `shard_map`."""
    return jax.lax.axis_index(sharding.spec[2]) * local


def write_split_rows(
    numbers: Numbers,
    at: At,
    new: Float[Array, "b s g k"],
    slots: Int[Array, "b s"],
    sharding: NamedSharding,
) -> Numbers:
    """As `write_rows`, for a cache whose slots are split over devices."""

    def local(numbers: Numbers, new: jax.Array, slots: jax.Array, *at: Layer) -> Numbers:
        return write_rows(numbers, at, new, slots - first_slot(sharding, numbers.shape[-2]))

    rows, heads = sharding.spec[:2]
    stored = specs_of(numbers, sharding, lead=len(at))
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(
            *(stored, PartitionSpec(rows, None, heads), PartitionSpec(rows)),
            *(PartitionSpec() for _ in at),
        ),
        out_specs=stored,
        check_vma=False,
    )(numbers, new, slots, *(jnp.asarray(layer) for layer in at))
