"""Moments in eight bits, block by block (Dettmers et al. 2022, arXiv 2110.02861).

A number is stored as the code of the nearest of 256 levels, relative to the largest magnitude of
its block. A block is part of one row of an array, so codes have the shape and the sharding of the
array.

Legend: n columns, k blocks of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ed_infra.parameter_names import normalize_parameter_name
from jaxtyping import Array, Float, UInt8

from ed_trainers.optimizers.per_array import create_transformation

#: Smaller arrays have float32 moments: they need little memory, and norms need the precision.
SMALLEST = 4096

# Moments that are never negative: all 256 levels are theirs.
_UNSIGNED = "nu"


class EightBitArray(NamedTuple):
    """An array in eight bits: codes uint8 [.., n], largest magnitudes float32 [.., k]."""

    codes: UInt8[Array, "*rows n"]
    scales: Float[Array, "*rows k"]


@cache
def levels(*, signed: bool) -> np.ndarray:
    """Return the 256 levels of the paper's dynamic tree in ascending order, float32.

    The leading zeros of a code are a power of ten, the other bits a linear fraction of it.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        fractions = 2 ** (exponent if signed else exponent + 1)
        edges = np.linspace(0.1, 1.0, fractions + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        values.extend(middles)
        if signed:
            values.extend(-middles)
    return np.sort(np.asarray(values, np.float32))


def quantize_blocks(x: jax.Array, *, signed: bool, block_size: int) -> EightBitArray:
    """Return the codes of numbers [.., n]: the nearest level within each block."""
    pieces = _pieces(x.astype(jnp.float32), block_size)
    scales = _largest(jnp.max(jnp.abs(pieces), axis=-1), x.shape[-1], block_size)
    divisors = _spread(jnp.where(scales == 0, 1.0, scales), x.shape[-1], block_size)
    codes = _nearest(pieces / divisors, signed=signed).astype(jnp.uint8)
    return EightBitArray(codes.reshape(x.shape), scales)


def dequantize_blocks(blocks: EightBitArray, *, signed: bool, block_size: int) -> jax.Array:
    """Return the numbers of the codes, float32 [.., n]."""
    n = blocks.codes.shape[-1]
    values = _values(_pieces(blocks.codes, block_size), signed=signed)
    return (values * _spread(blocks.scales, n, block_size)).reshape(blocks.codes.shape)


# Within a power of ten, the distance of two levels is constant. Therefore codes and levels follow
# from arithmetic, which compilers fuse with the update. Searches and tables would need arrays of
# indices with four bytes for each number.


def _decades(*, signed: bool) -> list[tuple[int, int, float, float]]:
    """Return the index of the first level, the number of levels, the scale and the first level.

    There is one entry for each power of ten; indices are relative to the level 0.
    """
    decades, first = [], 1
    for exponent in range(7):
        count = 2 ** (exponent if signed else exponent + 1)
        scale = 10.0 ** (exponent - 6)
        decades.append((first, count, scale, scale * (0.1 + 0.45 / count)))
        first += count
    return decades


def _nearest(x: jax.Array, *, signed: bool) -> jax.Array:
    """Return the codes of the nearest levels, float32.

    The code is the number of middles between two levels that are smaller.
    """
    table = levels(signed=signed)
    zero = int(np.searchsorted(table, 0.0))
    middles = (table[zero:-1] + table[zero + 1 :]) / 2
    size = jnp.abs(x)
    smaller = jnp.zeros_like(x)
    for first, count, scale, _ in _decades(signed=signed):
        level_index = jnp.ceil(size * (count / 0.9 / scale) - count / 9)
        smaller += jnp.where(size > middles[first - 1], jnp.clip(level_index, 1, count), 0.0)
    # Among the negative levels, -1 is missing.
    return jnp.where(x < 0, zero - smaller, zero + smaller + (x > middles[-1]))


def _values(codes: jax.Array, *, signed: bool) -> jax.Array:
    """Return the levels of codes, float32."""
    zero = int(np.searchsorted(levels(signed=signed), 0.0))
    above = codes.astype(jnp.float32) - zero
    index = jnp.abs(above)
    value = jnp.zeros_like(index)
    for first, count, scale, start in _decades(signed=signed):
        value = jnp.where(index >= first, start + (0.9 * scale / count) * (index - first), value)
    value = jnp.where(above == 255 - zero, 1.0, value)
    return jnp.where(above < 0, -value, value)


def eight_bit(
    inner: optax.GradientTransformation, *, block_size: int
) -> optax.GradientTransformation:
    """Store the moments of a transformation of one array in eight bits.

    Args:
        inner: computes in float32; what has the array's shape in its state is stored as
        `EightBitArray`.
        block_size: numbers of a row that share a scale.
    """

    def pack(state: optax.OptState, shape: tuple[int, ...]) -> optax.OptState:
        def pack_leaf(path: Sequence[object], leaf: jax.Array) -> jax.Array | EightBitArray:
            if leaf.shape != shape:
                return leaf
            return quantize_blocks(leaf, signed=_is_signed(path), block_size=block_size)

        return jax.tree_util.tree_map_with_path(pack_leaf, state)

    def unpack(state: optax.OptState) -> optax.OptState:
        def unpack_leaf(path: Sequence[object], leaf: jax.Array | EightBitArray) -> jax.Array:
            if not isinstance(leaf, EightBitArray):
                return leaf
            return dequantize_blocks(leaf, signed=_is_signed(path), block_size=block_size)

        return jax.tree_util.tree_map_with_path(
            unpack_leaf, state, is_leaf=lambda node: isinstance(node, EightBitArray)
        )

    def init(param: jax.Array) -> optax.OptState:
        # Moments begin as zeros. A barrier prevents that the compiler computes their codes.
        moments = jax.lax.optimization_barrier(inner.init(param.astype(jnp.float32)))
        return pack(moments, param.shape)

    def update(
        grad: jax.Array, state: optax.OptState, param: jax.Array | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        direction, new = inner.update(grad.astype(jnp.float32), unpack(state), param)
        return direction, pack(new, grad.shape)

    return create_transformation(init, update)


def _is_signed(path: Sequence[object]) -> bool:
    return normalize_parameter_name(path)[-1] != _UNSIGNED


def _piece(n: int, block_size: int) -> int:
    """Return the size of a piece: blocks and rows consist of whole pieces."""
    return math.gcd(n, min(block_size, n))


def _pieces(x: jax.Array, block_size: int) -> jax.Array:
    """Reshape [.., n] to pieces [.., n / size, size]."""
    return x.reshape(*x.shape[:-1], -1, _piece(x.shape[-1], block_size))


def _largest(x: jax.Array, n: int, block_size: int) -> jax.Array:
    """Return the largest magnitude of each block [.., k] from those of the pieces."""
    count = min(block_size, n) // _piece(n, block_size)
    padded = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % count)])
    return padded.reshape(*x.shape[:-1], -1, count).max(-1)


def _spread(scales: jax.Array, n: int, block_size: int) -> jax.Array:
    """Return the scale of each piece, [.., n / size, 1]."""
    size = _piece(n, block_size)
    return jnp.repeat(scales, min(block_size, n) // size, axis=-1)[..., : n // size, None]
