"""Dropout, from an integer hash of the place of each number.

The hash is the finalizer of Wellons' `lowbias32`. It needs a fifth of the operations of a PRNG, and
is sufficient for dropout. A number is dropped or kept whatever the sharding of its array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

_IS_DISABLED: ContextVar[bool] = ContextVar("is_disabled", default=False)


@contextmanager
def disable_dropout(is_disabled: bool = True) -> Iterator[bool]:
    """Trace functions without dropout, although they get a key; False changes nothing."""
    token = _IS_DISABLED.set(is_disabled or _IS_DISABLED.get())
    try:
        yield is_disabled
    finally:
        _IS_DISABLED.reset(token)


def is_dropout_disabled() -> bool:
    """Return whether the caller is inside of `disable_dropout`."""
    return _IS_DISABLED.get()


def select_dropout_key(key: jax.Array | None) -> jax.Array | None:
    """Return the key, or None while dropout is disabled."""
    return None if _IS_DISABLED.get() else key


def apply_dropout(x: Float[Array, "*dims"], rate: float, key: jax.Array) -> Float[Array, "*dims"]:
    """Replace numbers by 0 with probability `rate`, and divide the others by `1 - rate`."""
    if _IS_DISABLED.get():
        return x
    if rate >= 1:
        return jnp.zeros_like(x)
    return jnp.where(kept_places(key, rate, x.shape), x / (1 - rate), 0)


def kept_places(key: jax.Array, rate: float, shape: tuple[int, ...]) -> Bool[Array, "*dims"]:
    """Return which places of an array dropout keeps."""
    seed = get_seed(key)
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        # The index in the flat array, modulo 2**32.
        stride = math.prod(shape[axis + 1 :]) % 2**32
        if size > 1:
            place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return hash_bits(hash_bits(place ^ seed[0]) ^ seed[1]) >= get_threshold(rate)


def get_threshold(rate: float) -> UInt[Array, ""]:
    """Return the number below which a hash drops."""
    return jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def get_seed(key: jax.Array) -> UInt[Array, " 2"]:
    """Return the two numbers that a hash reads, drawn from a key."""
    return jax.random.bits(key, (2,), jnp.uint32)


def hash_bits(x: UInt[Array, "*dims"]) -> UInt[Array, "*dims"]:
    """Return the hash of 32-bit numbers; a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
