"""Attention block by block in plain XLA: the core of `blockwise` and of each step of `ring`.

Each block of queries visits the blocks of its visible keys. Forward and backward pass follow
FlashAttention (Dao et al., 2022): no [s, t] array exists, and the backward pass recomputes the
scores from the log-sum-exp.

Legend: b batch, g kv heads, r heads per kv head, k head dim of queries and keys, d head dim of
values, i query block, j key block, x queries in a block, y keys in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from ed_layers.attention.kernels.softmax import PartialAttention, over_blocks
from ed_layers.attention.kernels.visibility import blocks_seen
from ed_layers.attention.scoring import (
    Alibi,
    RelativeBias,
    Scoring,
    WindowLimit,
    compute_dropout_mask,
    get_head_indices,
    pad_axis,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """The static settings of a call, which both passes share."""

    scale: float
    soft_cap: float | None
    causal: bool
    dropout: float
    softmax_dtype: jnp.dtype
    alibi: Alibi | None = None

    @classmethod
    def of(cls, scoring: Scoring, *, causal: bool) -> Recipe:
        """Return the static settings of a Scoring."""
        dtype = jnp.dtype(scoring.softmax_dtype)
        return cls(scoring.scale, scoring.soft_cap, causal, scoring.dropout, dtype, scoring.alibi)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("q_segments", "q_index", "k_segments", "k_index"),
        *("window", "chunk", "key", "places", "ahead"),
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class BlockMask:
    """The attention mask in blocks, which has no gradient.

    Attributes:
        q_segments, q_index: [i, b, x].
        k_segments, k_index: [j, b, y].
        window, chunk: scalars in which 0 = no limit, or None.
        key: random key of dropout, or None.
        places: coordinates for dropout and ALiBi if the blocks are part of a larger call: rows [b],
            heads [h], queries [i, x] and keys [j, y] of that call. None = count from 0.
        ahead: number of later keys that a causal query attends to, [i, b, x]; None = 0.
    """

    q_segments: Int[Array, "i b x"]
    q_index: Int[Array, "i b x"]
    k_segments: Int[Array, "j b y"]
    k_index: Int[Array, "j b y"]
    window: WindowLimit | None = None
    chunk: WindowLimit | None = None
    key: jax.Array | None = None
    places: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None = None
    ahead: Int[Array, "i b x"] | None = None

    @classmethod
    def of(cls, mask_info: MaskInfo, scoring: Scoring, block_q: int, block_k: int) -> BlockMask:
        """Split a mask into blocks."""
        return cls(
            row_blocks(mask_info.q_segment_ids, block_q),
            row_blocks(mask_info.q_index, block_q),
            row_blocks(mask_info.kv_segment_ids, block_k),
            row_blocks(mask_info.kv_index, block_k),
            scoring.window,
            scoring.chunk,
            scoring.dropout_key if scoring.dropout > 0 else None,
            ahead=None if mask_info.ahead is None else row_blocks(mask_info.ahead, block_q),
        )

    def get_mask(self, i: jax.Array, j: jax.Array, *, causal: bool) -> jax.Array:
        """Return the allowed pairs of one block, [b, 1, 1, x, y]."""
        ids = self.q_segments[i], self.k_segments[j], self.q_index[i], self.k_index[j]
        info = MaskInfo(*ids, causal, ahead=None if self.ahead is None else self.ahead[i])
        return info.get_mask(window=self.window, chunk=self.chunk)[:, None, None]

    def heads(self, groups: int, repeat: int) -> Int[Array, "g r"]:
        """Return the numbers of the heads."""
        if self.places is None:
            return get_head_indices(groups, repeat)
        return self.places[1].reshape(groups, repeat)

    def spans(self, *, causal: bool) -> tuple[jax.Array, jax.Array]:
        """Return the visible key blocks of each query block: the first, and one after the last."""
        ids = (self.q_segments, self.q_index, self.k_segments, self.k_index)
        return blocks_seen(*ids, self.window, self.chunk, causal=causal, ahead=self.ahead)


def row_blocks(x: jax.Array, block: int) -> jax.Array:
    """Reshape [b, n, ...] to [n / block, b, block, ...], padded with zeros (segment 0)."""
    x = pad_axis(x, 1, -x.shape[1] % block)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def _compute_scores(
    recipe: Recipe,
    mask: BlockMask,
    bias: jax.Array | None,
    relative: RelativeBias | None,
    i: jax.Array,
    j: jax.Array,
    q_i,
    k_j,
) -> tuple[jax.Array, jax.Array | float]:
    """Return the scores of one block [b, g, r, x, y], -inf if masked, and the slope of the cap."""
    # Half-precision products are summed and kept in the softmax dtype: large scores rounded to
    # eight bits would shift weights by several percent.
    products = partial(jnp.einsum, preferred_element_type=recipe.softmax_dtype)
    scores = products("bgrxk,bgyk->bgrxy", q_i, k_j) * recipe.scale
    scores, slope = Scoring(recipe.scale, soft_cap=recipe.soft_cap).cap(scores)
    if bias is not None:
        scores = scores + bias_block(bias, i, j, q_i.shape[-2], k_j.shape[-2])
    groups, repeat = q_i.shape[1:3]
    for by_distance in (recipe.alibi, relative):
        if by_distance is not None:
            heads = mask.heads(groups, repeat)
            scores = scores + by_distance.bias(heads, mask.q_index[i], mask.k_index[j])
    return jnp.where(mask.get_mask(i, j, causal=recipe.causal), scores, -jnp.inf), slope


def bias_block(bias: jax.Array, i: jax.Array, j: jax.Array, x: int, y: int) -> jax.Array:
    """Return one block of a bias [b, g, r, s, t] whose lengths are padded to whole blocks."""
    zero = jnp.zeros((), i.dtype)
    at = (zero, zero, zero, i * x, j * y)
    return jax.lax.dynamic_slice(bias, at, (*bias.shape[:3], x, y))


def compute_dropout_factors(
    recipe: Recipe, mask: BlockMask, i: jax.Array, j: jax.Array, shape: tuple[int, ...]
):
    """Return the dropout factor of each weight of a block [b, g, r, x, y]: 0 or 1 / (1 - rate)."""
    b, groups, repeat, x, y = shape
    if mask.places is None:
        rows, heads = jnp.arange(b), jnp.arange(groups * repeat)
        queries, keys = i * x + jnp.arange(x), j * y + jnp.arange(y)
    else:
        rows, heads, queries, keys = mask.places
        queries, keys = queries[i], keys[j]
    rows, heads = rows[:, None, None, None, None], heads.reshape(1, groups, repeat, 1, 1)
    queries = queries[:, None]
    assert mask.key is not None
    stays = compute_dropout_mask(mask.key, recipe.dropout, rows, heads, queries, keys)
    return stays.astype(recipe.softmax_dtype) / (1 - recipe.dropout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_of_blocks(
    recipe: Recipe, q, k, v, bias, relative: RelativeBias | None, mask: BlockMask
) -> tuple[jax.Array, jax.Array]:
    """Compute attention of blocks of queries to blocks of keys.

    Args:
        q: [i, b, g, r, x, k].
        k, v: [j, b, g, y, k] and [j, b, g, y, d].
        bias: [b or 1, g or 1, r or 1, i * x, j * y] or None.
        relative: a bias by distance, whose table has a gradient.

    Returns:
        The output [i, b, g, r, x, d] in the softmax dtype, and the log-sum-exp of the scores
        [i, b, g, r, x, 1]. For a query without visible keys, these are 0 and -inf.
    """
    return forward(recipe, q, k, v, bias, mask, get_output_and_lse, relative)


def get_output_and_lse(part: PartialAttention) -> tuple[jax.Array, jax.Array]:
    """Return the output of a Part, and its log-sum-exp."""
    return part.out, part.lse


def forward(
    recipe: Recipe,
    q,
    k,
    v,
    bias,
    mask: BlockMask,
    finish: Callable[[PartialAttention], T],
    relative: RelativeBias | None = None,
) -> T:
    """Process the query blocks in order; each visits its visible key blocks.

    Args:
        finish: maps the Part of one query block, [b, g, r, x, ...], to a result.

    Returns:
        The results of `finish`, stacked over the query blocks.
    """

    def query_block(block):
        i, q_i, first, last = block

        def key_block(j: jax.Array):
            def weighted_sum(weights: jax.Array) -> jax.Array:
                if mask.key is not None:
                    weights = weights * compute_dropout_factors(recipe, mask, i, j, weights.shape)
                return jnp.einsum(
                    "bgrxy,bgyk->bgrxk",
                    weights.astype(v.dtype),
                    v[j],
                    preferred_element_type=recipe.softmax_dtype,
                )

            scores, _ = _compute_scores(recipe, mask, bias, relative, i, j, q_i, k[j])
            return scores, weighted_sum

        start = PartialAttention.empty(q_i.shape[:-1], v.shape[-1], recipe.softmax_dtype)
        if k.shape[0] == 1:  # without a loop, each turn of which a GPU reports to the processor
            return finish(start.and_block(*key_block(jnp.int32(0))))
        return finish(over_blocks(first, last, start, key_block))

    blocks = jnp.arange(q.shape[0])
    return jax.lax.map(query_block, (blocks, q, *mask.spans(causal=recipe.causal)))


def _forward_and_save(recipe: Recipe, q, k, v, bias, relative, mask: BlockMask):
    # Named here, so a remat policy that keeps these arrays does not run the forward pass again.
    results = forward(recipe, q, k, v, bias, mask, get_output_and_lse, relative)
    out, lse = checkpoint_name(results, "attn_output")
    return (out, lse), (q, k, v, bias, relative, mask, out, lse)


def backward_of_call(recipe: Recipe, saved, cotangents):
    q, k, v, bias, relative, mask, out, lse = saved
    d_out, d_lse = cotangents
    # The term that all weights of a query share: the mean of the softmax, and d_lse.
    shared = jnp.sum(d_out * out, axis=-1, keepdims=True) - d_lse
    grads = backward(recipe, q, k, v, bias, mask, lse, shared, d_out, relative)
    as_given = jax.tree.map(lambda d, x: d.astype(x.dtype), grads, (q, k, v, bias, relative))
    return *as_given, None


def backward(
    recipe: Recipe,
    q,
    k,
    v,
    bias,
    mask: BlockMask,
    lse,
    shared,
    d_out,
    relative: RelativeBias | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, RelativeBias | None]:
    """Return the gradients of q, k, v, bias and relative in the softmax dtype.

    Args:
        lse: log-sum-exp over all keys of a query, including keys that are not in `k`.
        shared: `sum(d_out * out) - d_lse`, [i, b, g, r, x, 1].
    """
    # A query without visible keys must have weight 0: exp(-inf - inf) is 0.
    lse = jnp.where(jnp.isfinite(lse), lse, jnp.inf)

    def query_block(carry, block):
        i, q_i, lse_i, shared_i, d_out_i, first, last = block

        def key_block(j, grads):
            d_q_i, d_k, d_v, d_bias, d_relative = grads
            scores, slope = _compute_scores(recipe, mask, bias, relative, i, j, q_i, k[j])
            weights = jnp.exp(scores - lse_i)
            d_weights = jnp.einsum("bgrxk,bgyk->bgrxy", d_out_i, v[j])
            dropped = weights
            if mask.key is not None:
                factor = compute_dropout_factors(recipe, mask, i, j, weights.shape)
                dropped, d_weights = weights * factor, d_weights * factor
            d_scores = weights * (d_weights - shared_i)
            d_v = d_v.at[j].add(jnp.einsum("bgrxy,bgrxk->bgyk", dropped, d_out_i))
            if d_bias is not None:
                d_bias = add_block(d_bias, i, j, d_scores)
            if relative is not None:
                heads, index = mask.heads(*q_i.shape[1:3]), (mask.q_index[i], mask.k_index[j])
                _, pull = jax.vjp(lambda x: x.bias(heads, *index), relative)
                (block_gradient,) = pull(d_scores.astype(relative.table.dtype))
                d_relative = jax.tree.map(jnp.add, d_relative, block_gradient)
            d_scores = d_scores * slope * recipe.scale
            d_k = d_k.at[j].add(jnp.einsum("bgrxy,bgrxk->bgyk", d_scores, q_i))
            d_q_i = d_q_i + jnp.einsum("bgrxy,bgyk->bgrxk", d_scores, k[j])
            return d_q_i, d_k, d_v, d_bias, d_relative

        start = (jnp.zeros(q_i.shape, recipe.softmax_dtype), *carry)
        d_q_i, *carry = jax.lax.fori_loop(first, last, key_block, start)
        return tuple(carry), d_q_i

    d_k, d_v = (jnp.zeros(x.shape, recipe.softmax_dtype) for x in (k, v))
    d_bias = None if bias is None else jnp.zeros(bias.shape, recipe.softmax_dtype)
    blocks = (jnp.arange(q.shape[0]), q, lse, shared, d_out, *mask.spans(causal=recipe.causal))
    d_relative = jax.tree.map(jnp.zeros_like, relative)
    start = (d_k, d_v, d_bias, d_relative)
    (d_k, d_v, d_bias, d_relative), d_q = jax.lax.scan(query_block, start, blocks)
    return d_q, d_k, d_v, d_bias, d_relative


def add_block(bias: jax.Array, i: jax.Array, j: jax.Array, block: jax.Array) -> jax.Array:
    """Add [b, g, r, x, y] to one block of [b or 1, g or 1, r or 1, s, t]."""
    summed = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
    block = jnp.sum(block, axis=summed, keepdims=True)
    x, y = block.shape[-2:]
    zero = jnp.zeros((), i.dtype)
    at = (zero, zero, zero, i * x, j * y)
    return jax.lax.dynamic_update_slice(bias, bias_block(bias, i, j, x, y) + block, at)


attention_of_blocks.defvjp(_forward_and_save, backward_of_call)
