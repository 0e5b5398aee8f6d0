"""Attention to the slots of a contiguous cache, block by block.

A block may consist of parallel splits with separate softmax sums (flash decoding, Dao et al. 2023),
so one query can use a whole accelerator.

Legend: b batch, g kv heads, r heads per kv head, s queries, t slots, k key dim, d value dim,
n scales of a head, p splits, y slots of a split in one block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.typing import DTypeLike

from ed_layers.attention.kernels.softmax import Bound, PartialAttention, over_blocks
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.codes import Codes, Numbers, decode_numbers, map_slots
from ed_layers.cache.storage import Layer
from ed_layers.projections.matmul import batch_matmul


@dataclass(frozen=True)
class KeyValueSlots:
    """Keys and values of one layer, read in blocks without a copy of the layer.

    Attributes:
        keys, values: [b, g, t, k] and [b, g, t, d], or with a leading layer axis.
        at: index of the layer in them, `(layer,)` or `()`.
        splits, block: p and y.
    """

    keys: Numbers
    values: Numbers
    at: tuple[Layer, ...]
    splits: int
    block: int

    @property
    def count(self) -> int:
        """Slots."""
        return self.keys.shape[-2]

    @property
    def step(self) -> int:
        """Number of slots in a block."""
        return self.splits * self.block

    def read(self, numbers: Numbers, first: jax.Array) -> Numbers:
        """Return the block at a slot, [b, g, p, y, k]; codes and scales if quantized."""

        def one(array: jax.Array, axis: int) -> jax.Array:
            lead = len(self.at)
            zero = jnp.zeros((), first.dtype)
            start = [*(jnp.asarray(i, first.dtype) for i in self.at)]
            start += [zero] * (array.ndim - lead)
            start[axis] = first
            shape = (*(1,) * lead, *array.shape[lead:axis], self.step, *array.shape[axis + 1 :])
            return jax.lax.dynamic_slice(array, start, shape).reshape(shape[lead:])

        block = map_slots(one, numbers)
        shape = (*block.shape[:2], self.splits, self.block, block.shape[-1])
        if not isinstance(block, Codes):
            return block.reshape(shape)
        scale = block.scale.reshape(*block.scale.shape[:3], self.splits, self.block)
        return Codes(block.values.reshape(shape), jnp.moveaxis(scale, 3, 2))


def at_least_two_blocks(splits: int, block: int, count: int) -> tuple[int, int]:
    """Return the number of splits and their slots, with at least two blocks in total.

    XLA would move the read of a single block out of the loop, merge it with the preceding write,
    and copy a stacked cache in every layer (observed on a CPU).
    """
    half = max(1, -(-count // 2))
    block = min(block, half)
    return max(1, min(splits, half // block)), block


def attention_to_slots(
    q: jax.Array,
    slots: KeyValueSlots,
    info: MaskInfo,
    scoring: Scoring,
    bias: jax.Array | None,
    bounds: tuple[Bound, Bound],
    heads: jax.Array,
    *,
    by_sum: bool = False,
) -> PartialAttention:
    """Compute the softmax of queries [b, g, r, s, k] over the slots between two bounds.

    Args:
        q: queries.
        slots: the stored keys and values.
        info: the mask; `kv_segment_ids` and `kv_index` describe the slots, [b, t].
        scoring: the settings of the scores.
        bias: [b or 1, g or 1, r or 1, s, t] or None.
        bounds: first slot, and the one after the last.
        heads: numbers of the heads, [g, r].
        by_sum: compute a single query of a single row by multiply-and-sum on a CPU.

    Returns:
        [b, g, r, s, 1], [b, g, r, s, 1] and [b, g, r, s, d], in the softmax dtype.
    """
    dtype, size, count = scoring.softmax_dtype, slots.step, slots.count
    lead = (*q.shape[:-1], slots.splits)

    def block(j: jax.Array):
        # The last block starts earlier to stay inside the buffer; slots read twice are masked.
        first = jnp.minimum(j * size, count - size)
        scores = _compute_scores(q, slots.read(slots.keys, first), dtype, by_sum) * scoring.scale
        scores, _ = scoring.cap(scores)
        if bias is not None:
            cut = jax.lax.dynamic_slice_in_dim(bias, first, size, axis=-1)
            scores = scores + cut.reshape(*cut.shape[:-1], slots.splits, slots.block).astype(dtype)
        if scoring.by_distance:
            index = jax.lax.dynamic_slice_in_dim(info.kv_index, first, size, axis=1)
            cut = scoring.distance_bias(heads, info.q_index, index)
            scores = scores + cut.reshape(*cut.shape[:-1], slots.splits, slots.block).astype(dtype)
        allowed = get_block_mask(info, first, size, scoring) & (
            first + jnp.arange(size) >= j * size
        )
        allowed = allowed.reshape(allowed.shape[0], 1, 1, q.shape[3], slots.splits, slots.block)
        scores = jnp.where(jnp.broadcast_to(allowed, (*lead, slots.block)), scores, -jnp.inf)

        def weighted_sum(weights: jax.Array) -> jax.Array:
            return _combine(weights, slots.read(slots.values, first), q.dtype, by_sum)

        return scores, weighted_sum

    first, last = bounds
    start = PartialAttention.empty(lead, slots.values.shape[-1], dtype)
    part = over_blocks(first // size, (last + size - 1) // size, start, block)
    return part.merged_along(-2)


def _compute_scores(q: jax.Array, k: Numbers, dtype: DTypeLike, by_sum: bool) -> jax.Array:
    """Return q·k of one block, [b, g, r, s, p, y]."""
    keys, scale = scale_apart(k, q.dtype)

    def matmul(q: jax.Array, k: jax.Array) -> jax.Array:
        b, groups, repeat, s, _ = q.shape
        joined, rows = (x.reshape(b, groups, -1, x.shape[-1]) for x in (q, k))
        scores = batch_matmul(joined, rows, transposed=True, dtype=dtype)
        return scores.reshape(b, groups, repeat, s, *k.shape[2:4])

    def multiply_and_sum(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(q[..., None, None, :] * k[:, :, None, None], axis=-1).astype(dtype)

    if by_sum:
        scores = jax.lax.platform_dependent(q, keys, cpu=multiply_and_sum, default=matmul)
    else:
        scores = matmul(q, keys)
    return scores if scale is None else scores * scale


def _combine(weights: jax.Array, v: Numbers, dtype: DTypeLike, by_sum: bool) -> jax.Array:
    """Return the weighted sum of the values of one block, [b, g, r, s, p, d]."""
    values, scale = scale_apart(v, dtype)
    scaled = weights if scale is None else weights * scale

    def matmul(weights: jax.Array, v: jax.Array) -> jax.Array:
        b, groups, repeat, s, splits, _ = weights.shape
        joined = weights.astype(dtype).reshape(b, groups, repeat * s, splits, -1)
        sums = batch_matmul(joined.swapaxes(2, 3), v, dtype=weights.dtype)
        return sums.swapaxes(2, 3).reshape(b, groups, repeat, s, splits, -1)

    def multiply_and_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(weights[..., None] * v[:, :, None, None], axis=-2)

    if by_sum:
        return jax.lax.platform_dependent(scaled, values, cpu=multiply_and_sum, default=matmul)
    return matmul(scaled, values)


def scale_apart(x: Numbers, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Return the factors of the product, and a scale [b, g, 1, 1, p, y] of its result, or None.

    If a slot has one scale, the product uses the codes directly.
    """
    if not isinstance(x, Codes) or x.scale.shape[-2] > 1:
        return decode_numbers(x, dtype), None
    return x.values.astype(dtype), x.scale[:, :, None, None, :, 0]


def get_block_mask(info: MaskInfo, first: jax.Array, size: int, scoring: Scoring) -> jax.Array:
    """Return the allowed pairs of queries and slots of a block, [b, s, size]."""
    segments, index = (
        jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)
        for x in (info.kv_segment_ids, info.kv_index)
    )
    block = replace(info, kv_segment_ids=segments, kv_index=index)
    return block.get_mask(window=scoring.window, chunk=scoring.chunk)
