"""Zig-zag order: a split sequence in which every device has as much causal work as the others.

Cut into 2n chunks, device i of n holds chunks i and 2n - 1 - i (Brandon et al. 2023, "Striped
Attention", show the imbalance of contiguous parts; zig-zag is the layout of Llama 3's context
parallelism): an early chunk sees little, its late partner much. Tensors enter and leave the order
by two permutations of devices each: chunks of even number are one from each device and one to each
device, and so are the odd ones.

Legend: n devices, c chunks (2n), L positions of one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Pairs = list[tuple[int, int]]
#: One mesh axis, or several that split a dimension together.
Axes = str | tuple[str, ...]


def home(chunk: int, n: int) -> int:
    """The device that holds a chunk in zig-zag order."""
    return chunk if chunk < n else 2 * n - 1 - chunk


def chunks_of(device: int | jax.Array, n: int) -> tuple[int | jax.Array, int | jax.Array]:
    """The chunks that a device holds in zig-zag order, the early one first."""
    return device, 2 * n - 1 - device


def routes(n: int) -> tuple[Pairs, Pairs]:
    """(from, to) of the even chunks and of the odd ones; device i sends chunks 2i and 2i + 1."""
    return (
        [(i, home(2 * i, n)) for i in range(n)],
        [(i, home(2 * i + 1, n)) for i in range(n)],
    )


def enter(x: jax.Array, axes: Axes, n: int) -> jax.Array:
    """From contiguous to zig-zag order, inside `shard_map`.

    Args:
        x: this device's part, [b, L, ...], L even.
        axes: what splits the sequence.
        n: devices along `axes`.
    """
    first, second = jnp.split(x, 2, axis=1)
    even, odd = routes(n)
    a, b = jax.lax.ppermute(first, axes, even), jax.lax.ppermute(second, axes, odd)
    # Of chunks i and 2n - 1 - i the even one came by the first permutation.
    ordered = jax.lax.axis_index(axes) % 2 == 0
    return jnp.concatenate([jnp.where(ordered, a, b), jnp.where(ordered, b, a)], axis=1)


def leave(x: jax.Array, axes: Axes, n: int) -> jax.Array:
    """The inverse of `enter`."""
    early, late = jnp.split(x, 2, axis=1)
    ordered = jax.lax.axis_index(axes) % 2 == 0
    even, odd = ([(to, start) for start, to in pairs] for pairs in routes(n))
    first = jax.lax.ppermute(jnp.where(ordered, early, late), axes, even)
    second = jax.lax.ppermute(jnp.where(ordered, late, early), axes, odd)
    return jnp.concatenate([first, second], axis=1)
