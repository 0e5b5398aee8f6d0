"""Memory-lean attention in plain XLA: online softmax over key blocks, masked blocks skipped.

Forward and backward follow FlashAttention (Dao 2022): no [s, t] array exists, the backward pass
recomputes scores block by block from the saved log-sum-exp.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim,
i query block, j key block, x queries in a block, y keys in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Shape:
    """The static part of a call: what both passes need to agree on."""

    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None
    causal: bool
    softmax_dtype: jnp.dtype


def blockwise_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    mask_info: MaskInfo,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax_dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "b s h k"]:
    """Softmax attention in memory linear in the length; see `attend` for the arguments.

    Args:
        block_q, block_k: tokens per block; lengths are padded to a multiple, padding is masked.
    """
    b, s, h, d = q.shape
    t, groups = k.shape[1], k.shape[2]
    block_q, block_k = min(block_q, s), min(block_k, t)
    shape = Shape(scale, window, chunk, soft_cap, mask_info.causal, jnp.dtype(softmax_dtype))

    # [i, b, g, r, x, k] and [j, b, g, y, k]: the block axis leads, so a loop indexes it for free.
    q_blocks = split(q.reshape(b, s, groups, h // groups, d), block_q).transpose(0, 1, 3, 4, 2, 5)
    k_blocks, v_blocks = (split(x, block_k).transpose(0, 1, 3, 2, 4) for x in (k, v))
    ids = (
        (split(mask_info.q_segment_ids, block_q), split(mask_info.q_index, block_q)),
        (split(mask_info.kv_segment_ids, block_k), split(mask_info.kv_index, block_k)),
    )
    out: jax.Array = attention_of_blocks(shape, q_blocks, k_blocks, v_blocks, ids)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, h, v.shape[-1])
    return out[:, :s]


def split(x: jax.Array, block: int) -> jax.Array:
    """[b, n, ...] to [n / block, b, block, ...], padded with zeros (segment 0 is padding)."""
    b, n = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -n % block), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(b, -1, block, *x.shape[2:]), 1, 0)


def block_mask(shape: Shape, q_ids, k_ids) -> jax.Array:
    """Which pairs of one block may attend: [b, 1, 1, x, y]."""
    info = MaskInfo(
        q_segment_ids=q_ids[0],
        kv_segment_ids=k_ids[0],
        q_index=q_ids[1],
        kv_index=k_ids[1],
        causal=shape.causal,
    )
    return info.allowed(window=shape.window, chunk=shape.chunk)[:, None, None]


def block_is_live(shape: Shape, q_ids, k_ids) -> jax.Array:
    """False where a whole block is masked, judged from the ranges of order index and segment."""
    (q_seg, q_at), (k_seg, k_at) = q_ids, k_ids
    big = jnp.iinfo(jnp.int32).max

    def low(seg: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(seg > 0, x, big), axis=1)

    def high(seg: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(seg > 0, x, -1), axis=1)

    live = (low(q_seg, q_seg) <= high(k_seg, k_seg)) & (low(k_seg, k_seg) <= high(q_seg, q_seg))
    if shape.causal:
        live &= low(k_seg, k_at) <= high(q_seg, q_at)
    if shape.window is not None:
        live &= low(q_seg, q_at) - high(k_seg, k_at) < shape.window
    return jnp.any(live)


def block_scores(shape: Shape, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores of one block before masking, [b, g, r, x, y], and the derivative of the soft cap."""
    scores = jnp.einsum("bgrxk,bgyk->bgrxy", q, k).astype(shape.softmax_dtype) * shape.scale
    if shape.soft_cap is None:
        return scores, jnp.ones((), scores.dtype)
    squashed = jnp.tanh(scores / shape.soft_cap)
    return shape.soft_cap * squashed, 1 - squashed**2


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_of_blocks(shape: Shape, q, k, v, ids) -> jax.Array:
    """[i, b, g, r, x, k] queries, [j, b, g, y, k] keys and values -> [i, b, g, r, x, k]."""
    return forward(shape, q, k, v, ids)[0]


def forward(shape: Shape, q, k, v, ids):
    """One query block after the other; each visits the live key blocks."""
    q_ids, k_ids = ids

    def query_block(block):
        q_i, ids_i = block
        rows = q_i.shape[:-1]
        start = (
            jnp.full((*rows, 1), -jnp.inf, shape.softmax_dtype),
            jnp.zeros((*rows, 1), shape.softmax_dtype),
            jnp.zeros((*rows, v.shape[-1]), shape.softmax_dtype),
        )

        def key_block(carry, block):
            k_j, v_j, ids_j = block

            def visit(carry):
                top, total, acc = carry
                scores, _ = block_scores(shape, q_i, k_j)
                scores = jnp.where(block_mask(shape, ids_i, ids_j), scores, -jnp.inf)
                new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
                anchor = jnp.where(jnp.isfinite(new_top), new_top, 0)
                weights = jnp.exp(scores - anchor)
                decay = jnp.exp(top - anchor)
                total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
                acc = acc * decay + jnp.einsum("bgrxy,bgyk->bgrxk", weights.astype(v_j.dtype), v_j)
                return new_top, total, acc

            live = block_is_live(shape, ids_i, ids_j)
            return jax.lax.cond(live, visit, lambda carry: carry, carry), None

        (top, total, acc), _ = jax.lax.scan(key_block, start, (k, v, k_ids))
        safe = jnp.where(total == 0, 1, total)
        # +inf makes exp(scores - lse) zero in the backward pass for rows that see nothing.
        lse = jnp.where(total == 0, jnp.inf, jnp.where(total == 0, 0, top) + jnp.log(safe))
        return (acc / safe).astype(q_i.dtype), lse

    return jax.lax.map(query_block, (q, q_ids))


def forward_and_save(shape: Shape, q, k, v, ids):
    out, lse = forward(shape, q, k, v, ids)
    return out, (q, k, v, ids, out, lse)


def backward(shape: Shape, saved, d_out):
    """Query blocks in order; gradients of keys and values accumulate in the carry."""
    q, k, v, (q_ids, k_ids), out, lse = saved

    def query_block(carry, block):
        q_i, ids_i, out_i, lse_i, d_out_i = block
        d_out_i = d_out_i.astype(shape.softmax_dtype)
        row = jnp.sum(d_out_i * out_i.astype(shape.softmax_dtype), axis=-1, keepdims=True)
        d_k, d_v = carry

        def key_block(d_q_i, block):
            k_j, v_j, ids_j, d_k_j, d_v_j = block

            def visit(grads):
                d_q_i, d_k_j, d_v_j = grads
                scores, slope = block_scores(shape, q_i, k_j)
                allowed = block_mask(shape, ids_i, ids_j)
                weights = jnp.where(allowed, jnp.exp(scores - lse_i), 0)
                d_weights = jnp.einsum("bgrxk,bgyk->bgrxy", d_out_i, v_j)
                d_scores = weights * (d_weights - row) * slope * shape.scale
                d_v_j = d_v_j + jnp.einsum("bgrxy,bgrxk->bgyk", weights, d_out_i)
                d_k_j = d_k_j + jnp.einsum("bgrxy,bgrxk->bgyk", d_scores, q_i)
                d_q_i = d_q_i + jnp.einsum("bgrxy,bgyk->bgrxk", d_scores, k_j)
                return d_q_i, d_k_j, d_v_j

            live = block_is_live(shape, ids_i, ids_j)
            grads = jax.lax.cond(live, visit, lambda grads: grads, (d_q_i, d_k_j, d_v_j))
            return grads[0], grads[1:]

        d_q_i, (d_k, d_v) = jax.lax.scan(
            key_block, jnp.zeros(q_i.shape, shape.softmax_dtype), (k, v, k_ids, d_k, d_v)
        )
        return (d_k, d_v), d_q_i

    zeros = (jnp.zeros(k.shape, shape.softmax_dtype), jnp.zeros(v.shape, shape.softmax_dtype))
    (d_k, d_v), d_q = jax.lax.scan(query_block, zeros, (q, q_ids, out, lse, d_out))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


attention_of_blocks.defvjp(forward_and_save, backward)
