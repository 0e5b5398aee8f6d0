"""Bounds of the keys that are visible to a range of queries, which limit the visited blocks.

`MaskInfo.allowed` decides for a single pair. Order indices count from 0 within a segment. Windows
and chunks are None, ints, or traced scalars in which 0 = no limit.

Legend: b batch, s queries, t slots, i query block, j key block, x, y their sizes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers.attention.scoring import WindowLimit

BIG = jnp.iinfo(jnp.int32).max


def visible(
    low: jax.Array,
    high: jax.Array,
    window: WindowLimit | None,
    chunk: WindowLimit | None,
    *,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Return the first and the last order index that is visible to queries from `low` to `high`.

    For causal queries that attend to later keys, `high` is the last of these keys.

    All visible keys are within these bounds. The first index may be negative, and the last may
    exceed the length.
    """
    first, last = jnp.zeros_like(low), high if causal else jnp.full_like(high, BIG)
    if window is not None:
        width = jnp.minimum(jnp.asarray(window), BIG // 2)  # the sum below must not overflow
        first = jnp.where(width > 0, jnp.maximum(first, low - width + 1), first)
        window_end = jnp.minimum(high, BIG // 2) + width - 1
        last = jnp.where(width > 0, jnp.minimum(last, window_end), last)
    if chunk is not None:
        size = jnp.maximum(jnp.asarray(chunk), 1)
        limited = jnp.asarray(chunk) > 0
        first = jnp.where(limited, jnp.maximum(first, low // size * size), first)
        chunk_end = high - high % size + (size - 1)
        last = jnp.where(limited, jnp.minimum(last, chunk_end), last)
    return first, last


def slots_seen(
    info: MaskInfo,
    window: WindowLimit | None,
    chunk: WindowLimit | None,
    count: int,
    first: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """Return the range of slots that some query sees: the first, and the one after the last.

    Args:
        info: a causal mask.
        window, chunk: limits.
        count: number of slots; slot i contains the token with order index `first + i`.
        first: order index of the first slot.
    """
    real = info.q_segment_ids != 0
    low = jnp.min(jnp.where(real, info.q_index, BIG))
    high = jnp.max(jnp.where(real, info.last_index, -1))
    start, last = visible(low, high, window, chunk)
    return jnp.clip(start - first, 0, count), jnp.clip(last + 1 - first, 0, count)


def blocks_seen(
    q_segments: Int[Array, "i b x"],
    q_index: Int[Array, "i b x"],
    k_segments: Int[Array, "j b y"],
    k_index: Int[Array, "j b y"],
    window: WindowLimit | None,
    chunk: WindowLimit | None,
    *,
    causal: bool,
    ahead: Int[Array, "i b x"] | None = None,
) -> tuple[Int[Array, " i"], Int[Array, " i"]]:
    """Return the visible key blocks of each query block: the first, and the one after the last.

    The function compares the ranges of segments and order indices of two blocks, for all rows
    together. These conditions are necessary, so no required block is omitted.
    """

    def bounds(segments: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the smallest and largest value of each block and row, without padding."""
        real = segments > 0
        return jnp.min(jnp.where(real, x, BIG), axis=2), jnp.max(jnp.where(real, x, -1), axis=2)

    # Queries as [i, 1, b], keys as [1, j, b].
    q_low, q_high = (x[:, None] for x in bounds(q_segments, q_index))
    if ahead is not None:
        q_high = bounds(q_segments, q_index + ahead)[1][:, None]
    k_low, k_high = (x[None] for x in bounds(k_segments, k_index))
    q_from, q_to = (x[:, None] for x in bounds(q_segments, q_segments))
    k_from, k_to = (x[None] for x in bounds(k_segments, k_segments))
    first, last = visible(q_low, q_high, window, chunk, causal=causal)
    live = (q_from <= k_to) & (k_from <= q_to) & (k_low <= last) & (first <= k_high)
    live = jnp.any(live, axis=2)
    blocks = jnp.arange(live.shape[1])
    start = jnp.min(jnp.where(live, blocks, live.shape[1]), axis=1)
    return start, jnp.max(jnp.where(live, blocks + 1, 0), axis=1)
