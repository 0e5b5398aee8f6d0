"""Attention with the whole score matrix: the exact reference, and the fast form for short queries.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

KVOrder = Literal["btgk", "bgtk"]


def vanilla_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b _ _ k"],
    v: Float[Array, "b _ _ k"],
    mask_info: MaskInfo,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    bias: Float[Array, "b h s t"] | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    softmax_dtype: jnp.dtype = jnp.float32,
    kv_order: KVOrder = "btgk",
    one_by_sum: bool = False,
) -> Float[Array, "b s h k"]:
    """Softmax attention; see `attend` for the arguments.

    Args:
        kv_order: order of the axes of `k` and `v`: as projected ("btgk") or as the dense cache
            keeps them ("bgtk").
        one_by_sum: on a CPU, compute a single query of a single row by multiply-and-sum. A matmul
            makes XLA:CPU copy the cache of the layer first (39.6 against 27.7 ms a step of a 135M
            model); on a cache that is stacked and carried by a scan it is the sum that copies, and
            all of it (34 against 1.3 ms for 24 layers of 4096 slots).
    """
    b, s, h, _ = q.shape
    groups = k.shape[2] if kv_order == "btgk" else k.shape[1]
    q = q.reshape(b, s, groups, h // groups, -1)
    scores = score(q, k, kv_order, one_by_sum).astype(softmax_dtype) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.reshape(b, groups, h // groups, s, -1).astype(softmax_dtype)
    allowed = mask_info.allowed(window=window, chunk=chunk)[:, None, None]
    scores = jnp.where(allowed, scores, -jnp.inf)

    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.reshape(1, groups, h // groups, 1, 1).astype(softmax_dtype)
        top = jnp.maximum(top, sink)
    # A row that may attend to nothing has top = -inf; it becomes zeros, not NaN.
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total == 0, 1, total)
    if dropout > 0 and dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout), 0)
    return combine(weights.astype(v.dtype), v, kv_order, one_by_sum).reshape(b, s, h, -1)


def score(q: jax.Array, k: jax.Array, kv_order: KVOrder, one_by_sum: bool) -> jax.Array:
    """q·k over the head dim: [b, g, r, s, t]."""

    def by_matmul(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum(f"bsgrk,{kv_order}->bgrst", q, k)

    def by_sum(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(q[:, 0, :, :, None, :] * k[:, :, None], axis=-1)[:, :, :, None]

    if one_by_sum and q.shape[:2] == (1, 1):
        return jax.lax.platform_dependent(q, k, cpu=by_sum, default=by_matmul)
    return by_matmul(q, k)


def combine(weights: jax.Array, v: jax.Array, kv_order: KVOrder, one_by_sum: bool) -> jax.Array:
    """Weighted sum of values: [b, s, g, r, k]."""

    def by_matmul(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum(f"bgrst,{kv_order}->bsgrk", weights, v)

    def by_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(weights[:, :, :, 0, :, None] * v[:, :, None], axis=3)[:, None]

    if one_by_sum and (weights.shape[0], weights.shape[3]) == (1, 1):
        return jax.lax.platform_dependent(weights, v, cpu=by_sum, default=by_matmul)
    return by_matmul(weights, v)
