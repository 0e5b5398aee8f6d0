"""Fingerprints of arrays: checksums that are computed on the devices of the arrays.

Each element is hashed together with its index, and the hashes are summed. The sum is the same on
every mesh, and one changed element always changes the sum. A stacked leaf has a sum for each layer,
so the fingerprint of a model does not depend on the storage of its layers.

Legend: L layers of a stacked leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from ed_infra.errors import CheckpointError
from ed_infra.parameter_names import canonical, is_stacked
from jax.sharding import Sharding

from ed_trainers.placement import replicate_sharding

#: `dtype[shape] sum` of each array, by canonical name.
Fingerprint = dict[str, str]

# Odd constants, whose multiples are all different and far apart.
_PLACES = (0x915F77F5, 0xADB4A92D, 0x2C1B3C6D, 0x297A2D39, 0x93D765DD, 0xE817FB2D)


def fingerprint_arrays(arrays: Mapping[str, jax.Array]) -> Fingerprint:
    """Return the fingerprint of arrays by storage name; no array leaves its devices.

    Args:
        arrays: arrays by name; the parts of a storage path are joined by `/`.
    """
    sums = {
        name: _summing(replicate_sharding(leaf.sharding), is_stacked(name.split("/")))(leaf)
        for name, leaf in arrays.items()
    }
    result: Fingerprint = {}
    for name, total in jax.device_get(sums).items():
        leaf, path = arrays[name], name.split("/")
        shape = leaf.shape[1:] if is_stacked(path) else leaf.shape
        for one, checksum in zip(canonical(path), total.reshape(-1), strict=True):
            result[one] = f"{leaf.dtype}{list(shape)} {int(checksum):08x}"
    return result


def check_same(saved_fingerprint: Mapping[str, str], now: Mapping[str, str], location: str) -> None:
    """Compare the frozen weights of a run with the frozen weights of a checkpoint.

    Raises:
        CheckpointError: the message names the first differences.
    """
    differences = [f"{name} is missing" for name in saved_fingerprint if name not in now]
    differences += [f"{name} is new" for name in now if name not in saved_fingerprint]
    differences += [
        f"{name} was {saved_fingerprint[name]} and is {now[name]}"
        for name in saved_fingerprint
        if name in now and saved_fingerprint[name] != now[name]
    ]
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"{location} contains only trained parameters, over frozen weights that are not these "
            f"({'; '.join(differences[:3])}{more}): load the weights that the run began with, in "
            "the same dtype and quantization, or use another save_directory"
        )


@lru_cache(maxsize=256)
def _summing(sharding: Sharding, stacked: bool) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(partial(_sum, stacked=stacked), out_shardings=sharding)


def _sum(leaf: jax.Array, *, stacked: bool) -> jax.Array:
    """Return the sum of hashes, a uint32 scalar, or [L]."""
    bits = _bits(leaf)
    first = int(stacked)
    place = jnp.zeros((), jnp.uint32)
    for axis in range(first, bits.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place + index * jnp.uint32(_PLACES[(axis - first) % len(_PLACES)])
    # Bijective steps: two values at one index never have the same hash.
    hashed = (bits + _mix_bits(place)) * jnp.uint32(0x9E3779B1)
    return jnp.sum(_mix_bits(hashed), axis=tuple(range(first, bits.ndim)), dtype=jnp.uint32)


def _mix_bits(x: jax.Array) -> jax.Array:
    # `lowbias32` of Wellons' hash-prospector, which is bijective.
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _bits(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; wider elements have an additional dimension."""
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    width = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    size = min(width(leaf.dtype).bits, 32)
    names = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    return jax.lax.bitcast_convert_type(leaf, names[size]).astype(jnp.uint32)
