"""Moments in eight bits, block by block (Dettmers et al. 2022, arXiv 2110.02861).

A number is stored as the code of the nearest of 256 levels, relative to the largest magnitude of
its block. A block is part of one row of an array, so codes have the shape and the sharding of the
array.

Legend: n columns, k blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ed_infra.parameter_names import normalize
from jaxtyping import Array, Float, UInt8

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


def quantize(x: jax.Array, *, signed: bool, block_size: int) -> EightBitArray:
    """Return the codes of numbers [.., n]: the nearest level within each block."""
    blocks = _blocks(x.astype(jnp.float32), block_size)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    table = levels(signed=signed)
    middles = (table[:-1] + table[1:]) / 2
    shares = blocks / jnp.where(scales == 0, 1.0, scales)[..., None]
    codes = jnp.searchsorted(jnp.asarray(middles), shares).astype(jnp.uint8)
    return EightBitArray(codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scales)


def dequantize(blocks: EightBitArray, *, signed: bool, block_size: int) -> jax.Array:
    """Return the numbers of the codes, float32 [.., n]."""
    values = jnp.asarray(levels(signed=signed))[_blocks(blocks.codes, block_size)]
    whole = (values * blocks.scales[..., None]).reshape(*blocks.codes.shape[:-1], -1)
    return whole[..., : blocks.codes.shape[-1]]


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
        def packed(path: Sequence[object], leaf: jax.Array) -> jax.Array | EightBitArray:
            if leaf.shape != shape:
                return leaf
            return quantize(leaf, signed=_signed(path), block_size=block_size)

        return jax.tree_util.tree_map_with_path(packed, state)

    def unpack(state: optax.OptState) -> optax.OptState:
        def unpacked(path: Sequence[object], leaf: jax.Array | EightBitArray) -> jax.Array:
            if not isinstance(leaf, EightBitArray):
                return leaf
            return dequantize(leaf, signed=_signed(path), block_size=block_size)

        return jax.tree_util.tree_map_with_path(
            unpacked, state, is_leaf=lambda node: isinstance(node, EightBitArray)
        )

    def init(param: jax.Array) -> optax.OptState:
        return pack(inner.init(param.astype(jnp.float32)), param.shape)

    def update(
        grad: jax.Array, state: optax.OptState, param: jax.Array | None = None
    ) -> tuple[jax.Array, optax.OptState]:
        direction: Any
        direction, new = inner.update(grad.astype(jnp.float32), unpack(state), param)
        return direction, pack(new, grad.shape)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _signed(path: Sequence[object]) -> bool:
    return normalize(path)[-1] != _UNSIGNED


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """Reshape [.., n] to [.., k, block]; the last block is padded with zeros."""
    n = x.shape[-1]
    size = min(block_size, n)
    padded = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -n % size)])
    return padded.reshape(*x.shape[:-1], -1, size)
