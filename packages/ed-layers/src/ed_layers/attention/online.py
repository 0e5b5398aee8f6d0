"""Attention block by block, in plain XLA: the core of `blockwise` and of each step of `ring`.

An online softmax runs over key blocks for one block of queries after the other; blocks in which
everything is masked are never visited. Forward and backward follow FlashAttention (Dao et al.,
2022): no [s, t] array exists, the backward pass computes the scores again from the log-sum-exp.

Legend: b batch, g kv heads, r heads per kv head, k head dim of queries and keys, d head dim of
values, i query block, j key block, x queries in a block, y keys in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.ad_checkpoint import checkpoint_name

from ed_layers.attention.scoring import Scoring, kept


@dataclass(frozen=True)
class Spec:
    """The static part of a call: what both passes need to agree on."""

    scale: float
    soft_cap: float | None
    causal: bool
    dropout: float
    softmax_dtype: Any

    @classmethod
    def of(cls, scoring: Scoring, *, causal: bool) -> Spec:
        """Take the static part out of a Scoring."""
        dtype = jnp.dtype(scoring.softmax_dtype)
        return cls(scoring.scale, scoring.soft_cap, causal, scoring.dropout, dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("q_segments", "q_index", "k_segments", "k_index", "window", "chunk", "key", "places")
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Where:
    """Who may attend to whom, in blocks; what has no gradient.

    Attributes:
        q_segments, q_index: [i, b, x].
        k_segments, k_index: [j, b, y].
        window, chunk: scalars in which 0 = no limit, or None.
        key: of dropout, or None.
        places: what dropout goes by where blocks are parts of a larger call, in its numbers: rows
            [b], heads [h], queries [i, x] and keys [j, y]. None counts from 0.
    """

    q_segments: jax.Array
    q_index: jax.Array
    k_segments: jax.Array
    k_index: jax.Array
    window: Any = None
    chunk: Any = None
    key: jax.Array | None = None
    places: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None = None

    @classmethod
    def of(cls, mask_info: MaskInfo, scoring: Scoring, block_q: int, block_k: int) -> Where:
        """Cut a mask into blocks."""
        return cls(
            split(mask_info.q_segment_ids, block_q),
            split(mask_info.q_index, block_q),
            split(mask_info.kv_segment_ids, block_k),
            split(mask_info.kv_index, block_k),
            scoring.window,
            scoring.chunk,
            scoring.dropout_key if scoring.dropout > 0 else None,
        )

    def allowed(self, i: jax.Array, j: jax.Array, *, causal: bool) -> jax.Array:
        """Which pairs of one block may attend: [b, 1, 1, x, y]."""
        info = MaskInfo(
            self.q_segments[i], self.k_segments[j], self.q_index[i], self.k_index[j], causal
        )
        return info.allowed(window=self.window, chunk=self.chunk)[:, None, None]

    def spans(self, *, causal: bool) -> tuple[jax.Array, jax.Array]:
        """For each query block the first key block that it can see, and the one after the last.

        Judged from ranges of segment and order index, for all rows together: [i] and [i].
        """
        big = jnp.iinfo(jnp.int32).max

        def low(segments: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.min(jnp.where(segments > 0, x, big), axis=2)

        def high(segments: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.max(jnp.where(segments > 0, x, -1), axis=2)

        # Queries as [i, 1, b], keys as [1, j, b].
        q_low, q_high = (f(self.q_segments, self.q_index)[:, None] for f in (low, high))
        k_low, k_high = (f(self.k_segments, self.k_index)[None] for f in (low, high))
        q_first, q_last = (f(self.q_segments, self.q_segments)[:, None] for f in (low, high))
        k_first, k_last = (f(self.k_segments, self.k_segments)[None] for f in (low, high))
        live = (q_first <= k_last) & (k_first <= q_last)
        # Necessary conditions of a pair, on the bounds of a block: none is left out that is needed.
        if causal:
            live &= k_low <= q_high
        if self.window is not None:
            near = q_low - k_high < self.window
            if not causal:
                near &= k_low - q_high < self.window
            live &= near | (jnp.asarray(self.window) <= 0)
        if self.chunk is not None:
            size = jnp.maximum(jnp.asarray(self.chunk), 1)
            same = (q_low // size <= k_high // size) & (k_low // size <= q_high // size)
            live &= same | (jnp.asarray(self.chunk) <= 0)
        live = jnp.any(live, axis=2)
        blocks = jnp.arange(live.shape[1])
        first = jnp.min(jnp.where(live, blocks, live.shape[1]), axis=1)
        return first, jnp.max(jnp.where(live, blocks + 1, 0), axis=1)


def split(x: jax.Array, block: int) -> jax.Array:
    """[b, n, ...] to [n / block, b, block, ...], padded with zeros (segment 0 is padding)."""
    b, n = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -n % block), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(b, -1, block, *x.shape[2:]), 1, 0)


def scores_of(
    spec: Spec, where: Where, bias: jax.Array | None, i: jax.Array, j: jax.Array, q_i, k_j
) -> tuple[jax.Array, jax.Array | float]:
    """Scores of one block, [b, g, r, x, y], -inf where masked; and the derivative of the cap."""
    # Half-precision products are summed and kept in the softmax dtype: rounding scores of some tens
    # to eight bits would shift weights by several per cent.
    products = partial(jnp.einsum, preferred_element_type=spec.softmax_dtype)
    scores = products("bgrxk,bgyk->bgrxy", q_i, k_j) * spec.scale
    scores, slope = Scoring(spec.scale, soft_cap=spec.soft_cap).cap(scores)
    if bias is not None:
        scores = scores + block_of(bias, i, j, q_i.shape[-2], k_j.shape[-2])
    return jnp.where(where.allowed(i, j, causal=spec.causal), scores, -jnp.inf), slope


def block_of(bias: jax.Array, i: jax.Array, j: jax.Array, x: int, y: int) -> jax.Array:
    """One block of a bias [b, g, r, s, t] whose lengths are padded to whole blocks."""
    zero = jnp.zeros((), i.dtype)
    at = (zero, zero, zero, i * x, j * y)
    return jax.lax.dynamic_slice(bias, at, (*bias.shape[:3], x, y))


def kept_of(spec: Spec, where: Where, i: jax.Array, j: jax.Array, shape: tuple[int, ...]):
    """Factor of dropout on the weights of one block [b, g, r, x, y]: 0 or 1 / (1 - rate)."""
    b, groups, repeat, x, y = shape
    if where.places is None:
        rows, heads = jnp.arange(b), jnp.arange(groups * repeat)
        queries, keys = i * x + jnp.arange(x), j * y + jnp.arange(y)
    else:
        rows, heads, queries, keys = where.places
        queries, keys = queries[i], keys[j]
    rows, heads = rows[:, None, None, None, None], heads.reshape(1, groups, repeat, 1, 1)
    queries = queries[:, None]
    assert where.key is not None
    stays = kept(where.key, spec.dropout, rows, heads, queries, keys)
    return stays.astype(spec.softmax_dtype) / (1 - spec.dropout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_of_blocks(spec: Spec, q, k, v, bias, where: Where) -> tuple[jax.Array, jax.Array]:
    """Attention of blocks of queries to blocks of keys.

    Args:
        q: [i, b, g, r, x, k].
        k, v: [j, b, g, y, k] and [j, b, g, y, d].
        bias: [b or 1, g or 1, r or 1, i * x, j * y] or None.

    Returns:
        [i, b, g, r, x, d] in the softmax dtype, zeros for a query that sees nothing, and the
        log-sum-exp of its scores [i, b, g, r, x, 1], then -inf.
    """
    return forward(spec, q, k, v, bias, where)


def forward(spec: Spec, q, k, v, bias, where: Where) -> tuple[jax.Array, jax.Array]:
    """One query block after the other; each visits the key blocks of its span."""

    def query_block(block):
        i, q_i, first, last = block
        rows = q_i.shape[:-1]
        start = (
            jnp.full((*rows, 1), -jnp.inf, spec.softmax_dtype),
            jnp.zeros((*rows, 1), spec.softmax_dtype),
            jnp.zeros((*rows, v.shape[-1]), spec.softmax_dtype),
        )

        def key_block(j, carry):
            top, total, acc = carry
            scores, _ = scores_of(spec, where, bias, i, j, q_i, k[j])
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            anchor = jnp.where(jnp.isfinite(new_top), new_top, 0)
            weights = jnp.exp(scores - anchor)
            decay = jnp.exp(top - anchor)
            total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
            if where.key is not None:
                weights = weights * kept_of(spec, where, i, j, weights.shape)
            seen = jnp.einsum(
                "bgrxy,bgyk->bgrxk",
                weights.astype(v.dtype),
                v[j],
                preferred_element_type=spec.softmax_dtype,
            )
            return new_top, total, acc * decay + seen

        top, total, acc = jax.lax.fori_loop(first, last, key_block, start)
        return acc / jnp.where(total == 0, 1, total), top + jnp.log(total)

    blocks = jnp.arange(q.shape[0])
    return jax.lax.map(query_block, (blocks, q, *where.spans(causal=spec.causal)))


def forward_and_save(spec: Spec, q, k, v, bias, where: Where):
    # Named in here, so that a remat policy which keeps them need not run the forward pass again.
    out, lse = checkpoint_name(forward(spec, q, k, v, bias, where), "attn_output")
    return (out, lse), (q, k, v, bias, where, out, lse)


def backward_of_call(spec: Spec, saved, cotangents):
    q, k, v, bias, where, out, lse = saved
    d_out, d_lse = cotangents
    # What all weights of a query have in common: the sum that softmax takes out, and d_lse.
    shared = jnp.sum(d_out * out, axis=-1, keepdims=True) - d_lse
    d_q, d_k, d_v, d_bias = backward(spec, q, k, v, bias, where, lse, shared, d_out)
    grads = d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
    return *grads, None if d_bias is None else d_bias.astype(bias.dtype), None


def backward(
    spec: Spec, q, k, v, bias, where: Where, lse, shared, d_out
) -> tuple[Any, Any, Any, Any]:
    """Gradients of q, k, v and bias in the softmax dtype.

    Args:
        lse: log-sum-exp over *all* keys of a query, also of those that are not in `k`.
        shared: `sum(d_out * out) - d_lse`, [i, b, g, r, x, 1].
    """
    # A query that sees nothing: exp(-inf - inf) is the zero that it must be.
    lse = jnp.where(jnp.isfinite(lse), lse, jnp.inf)

    def query_block(carry, block):
        i, q_i, lse_i, shared_i, d_out_i, first, last = block

        def key_block(j, grads):
            d_q_i, d_k, d_v, d_bias = grads
            scores, slope = scores_of(spec, where, bias, i, j, q_i, k[j])
            weights = jnp.exp(scores - lse_i)
            d_weights = jnp.einsum("bgrxk,bgyk->bgrxy", d_out_i, v[j])
            dropped = weights
            if where.key is not None:
                factor = kept_of(spec, where, i, j, weights.shape)
                dropped, d_weights = weights * factor, d_weights * factor
            d_scores = weights * (d_weights - shared_i)
            d_v = d_v.at[j].add(jnp.einsum("bgrxy,bgrxk->bgyk", dropped, d_out_i))
            if d_bias is not None:
                d_bias = add_block(d_bias, i, j, d_scores)
            d_scores = d_scores * slope * spec.scale
            d_k = d_k.at[j].add(jnp.einsum("bgrxy,bgrxk->bgyk", d_scores, q_i))
            d_q_i = d_q_i + jnp.einsum("bgrxy,bgyk->bgrxk", d_scores, k[j])
            return d_q_i, d_k, d_v, d_bias

        start = (jnp.zeros(q_i.shape, spec.softmax_dtype), *carry)
        d_q_i, *carry = jax.lax.fori_loop(first, last, key_block, start)
        return tuple(carry), d_q_i

    zeros = tuple(
        None if x is None else jnp.zeros(x.shape, spec.softmax_dtype) for x in (k, v, bias)
    )
    blocks = (jnp.arange(q.shape[0]), q, lse, shared, d_out, *where.spans(causal=spec.causal))
    (d_k, d_v, d_bias), d_q = jax.lax.scan(query_block, zeros, blocks)
    return d_q, d_k, d_v, d_bias


def add_block(bias: jax.Array, i: jax.Array, j: jax.Array, block: jax.Array) -> jax.Array:
    """Add [b, g, r, x, y] to one block of [b or 1, g or 1, r or 1, s, t]."""
    summed = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
    block = jnp.sum(block, axis=summed, keepdims=True)
    x, y = block.shape[-2:]
    zero = jnp.zeros((), i.dtype)
    at = (zero, zero, zero, i * x, j * y)
    return jax.lax.dynamic_update_slice(bias, block_of(bias, i, j, x, y) + block, at)


attention_of_blocks.defvjp(forward_and_save, backward_of_call)
