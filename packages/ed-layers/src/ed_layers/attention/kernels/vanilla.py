"""Attention with the whole score matrix: the exact reference, and fast for few queries.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim,
d head dim of values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Cached, Kernel, Projected
from ed_layers.attention.scoring import Scoring, compute_dropout_mask, get_head_indices, split_heads
from ed_layers.projections.matmul import batch_matmul

KVOrder = Literal["btgk", "bgtk"]


def vanilla_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Compute attention to projected keys and values."""
    return by_matrix(call.q, call.k, call.v, call.mask_info, call.scoring, "btgk")


def vanilla_over_cache(call: Cached) -> Float[Array, "b s h d"]:
    """Compute attention to all slots of a cache, in their stored order."""
    stored = call.stored
    one_by_sum = stored.layout == "leaves"
    return by_matrix(
        call.q, *call.numbers(), stored.mask_info, call.scoring, "bgtk", one_by_sum=one_by_sum
    )


def by_matrix(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b _ _ k"],
    v: Float[Array, "b _ _ d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    kv_order: KVOrder,
    *,
    one_by_sum: bool = False,
) -> Float[Array, "b s h d"]:
    """Compute attention with one matrix of scores.

    Args:
        q, k, v: queries, keys and values.
        mask_info: the attention mask.
        scoring: the settings of the scores.
        kv_order: order of the axes of `k` and `v`: projected ("btgk") or stored ("bgtk").
        one_by_sum: on a CPU, compute a single query of a single row by multiply-and-sum. For a
            matmul, XLA:CPU copies the cache of the layer first (39.6 against 27.7 ms per step of a
            135M model). With a stacked cache that a scan carries, the sum copies the whole cache
            (34 against 1.3 ms for 24 layers of 4096 slots).
    """
    b, s, h, _ = q.shape
    groups = k.shape[2] if kv_order == "btgk" else k.shape[1]
    weights = softmax_weights(q, k, mask_info, scoring, kv_order, one_by_sum=one_by_sum)
    if scoring.dropout > 0 and scoring.dropout_key is not None:
        heads = jnp.arange(h).reshape(groups, -1, 1, 1)
        rows, queries, keys = (jnp.arange(n) for n in (b, s, weights.shape[-1]))
        stays = compute_dropout_mask(
            scoring.dropout_key,
            scoring.dropout,
            rows[:, None, None, None, None],
            heads,
            queries[:, None],
            keys,
        )
        weights = jnp.where(stays, weights / (1 - scoring.dropout), 0)
    # A cache of smaller numbers must not round the weights and the sum of float32 queries.
    weights = weights.astype(jnp.promote_types(q.dtype, v.dtype))
    weights = checkpoint_name(weights, "attn_weights")
    return combine(weights, v, kv_order, one_by_sum).reshape(b, s, h, -1)


def softmax_weights(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b _ _ k"],
    mask_info: MaskInfo,
    scoring: Scoring,
    kv_order: KVOrder,
    *,
    one_by_sum: bool = False,
) -> Float[Array, "b g r s t"]:
    """Return the weights before dropout; see `by_matrix`. Without visible keys, they are zero."""
    b, s, h, _ = q.shape
    groups = k.shape[2] if kv_order == "btgk" else k.shape[1]
    dtype = scoring.softmax_dtype
    q = q.reshape(b, s, groups, h // groups, -1)
    scores = _score(q, k, kv_order, one_by_sum, dtype) * scoring.scale
    scores, _ = scoring.cap(scores)
    if scoring.bias is not None:
        scores = scores + split_heads(scoring.bias, groups, h // groups).astype(dtype)
    if scoring.by_distance:
        heads = get_head_indices(groups, h // groups)
        bias = scoring.distance_bias(heads, mask_info.q_index, mask_info.kv_index)
        scores = scores + bias.astype(dtype)
    allowed = mask_info.get_mask(window=scoring.window, chunk=scoring.chunk)[:, None, None]
    scores = jnp.where(allowed, scores, -jnp.inf)

    top, sinks = jnp.max(scores, axis=-1, keepdims=True), scoring.sinks
    if sinks is not None:
        sinks = sinks.reshape(1, groups, h // groups, 1, 1).astype(dtype)
        top = jnp.maximum(top, sinks)
    # Without visible keys, top is -inf; the weights must be 0, not NaN.
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return weights / jnp.where(total == 0, 1, total)


def _score(
    q: jax.Array, k: jax.Array, kv_order: KVOrder, one_by_sum: bool, dtype: DTypeLike
) -> jax.Array:
    """Return q·k over the head dim, [b, g, r, s, t], with at least the precision of `dtype`."""

    def by_matmul(q: jax.Array, k: jax.Array) -> jax.Array:
        b, s, groups, repeat, _ = q.shape
        q, k = q.transpose(0, 2, 3, 1, 4), slots_last(k, kv_order)
        joined = q.reshape(b, groups, repeat * s, -1)
        scores = batch_matmul(joined, k, transposed=True, dtype=dtype)
        return scores.reshape(b, groups, repeat, s, -1)

    def by_sum(q: jax.Array, k: jax.Array) -> jax.Array:
        q, k = q[:, 0, :, :, None, :].astype(dtype), k[:, :, None].astype(dtype)
        return jnp.sum(q * k, axis=-1)[:, :, :, None]

    if one_by_sum and q.shape[:2] == (1, 1):
        return jax.lax.platform_dependent(q, k, cpu=by_sum, default=by_matmul)
    return by_matmul(q, k)


def combine(weights: jax.Array, v: jax.Array, kv_order: KVOrder, one_by_sum: bool) -> jax.Array:
    """Return the weighted sum of values, [b, s, g, r, k], in the dtype of the weights."""

    def by_matmul(weights: jax.Array, v: jax.Array) -> jax.Array:
        b, groups, repeat, s, _ = weights.shape
        joined, v = weights.reshape(b, groups, repeat * s, -1), slots_last(v, kv_order)
        out = batch_matmul(joined, v, dtype=jnp.promote_types(v.dtype, jnp.float32))
        out = out.astype(weights.dtype)
        return out.reshape(b, groups, repeat, s, -1).transpose(0, 3, 1, 2, 4)

    def by_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(weights[:, :, :, 0, :, None] * v[:, :, None], axis=3)[:, None]

    if one_by_sum and (weights.shape[0], weights.shape[3]) == (1, 1):
        return jax.lax.platform_dependent(weights, v, cpu=by_sum, default=by_matmul)
    return by_matmul(weights, v)


def slots_last(x: jax.Array, kv_order: KVOrder) -> Float[Array, "b g t k"]:
    """Return keys or values with one matrix per head."""
    return x if kv_order == "bgtk" else x.swapaxes(1, 2)


KERNELS = (
    Kernel("vanilla", "projected", "plain XLA, all scores", vanilla_attention),
    Kernel("vanilla", "cache", "plain XLA, all scores", vanilla_over_cache),
)


class Watched(NamedTuple):
    """Queries and keys of a layer, after norms and rotary positions, and the score settings."""

    q: Float[Array, "b s h k"]
    k: Float[Array, "b t g k"]
    mask_info: MaskInfo
    scoring: Scoring


def attention_weights(seen: Watched) -> Float[Array, "b h s t"]:
    """Return the weights of each query over the keys, for losses that compare the weights.

    They sum to 1, or are 0 for padding.
    """
    weights = softmax_weights(*seen, "btgk")
    b, groups, repeat, s, t = weights.shape
    return weights.reshape(b, groups * repeat, s, t)
