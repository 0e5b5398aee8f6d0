"""Local attention that also reads summaries of blocks (LongT5, Guo et al. 2022).

A block is `size` consecutive tokens of a segment. The last block of a segment also contains the
tokens that remain. A segment with fewer tokens has no block. A summary is the normed sum of the
hidden states of a block.

Legend: b batch, s sequence, d hidden, h heads, k head dim, m summaries of a row, n windows, w size
of a window, y keys of a token: those of three windows, and summaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from ed_layers.attention.blocks.self_attention import (
    SelfAttention,
    _CacheT,
    bidirectional,
    get_bucket_table,
)
from ed_layers.attention.blocks.settings import MaskRule, RelativeBuckets, ScoreRule
from ed_layers.attention.scoring import (
    RelativeBias,
    compute_dropout_mask,
    get_head_indices,
    pad_axis,
)
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.projections.linear import project


class SummaryAttention(SelfAttention):
    """Bidirectional self-attention to near tokens, and to the summaries of the own segment.

    The memory is linear in the length times the sum of window and number of summaries. Both kinds
    of keys have a table of relative position buckets: `Ctx.buckets` for tokens, and
    `Ctx.summary_buckets` for blocks.

    Args:
        parts: creates the projections and the norm of the summaries.
        size: number of tokens of a block.
        window: a token attends to tokens at a distance of less than `window`.
        position: the buckets of the distances.
        scores: scale of the scores.

    Raises:
        ConfigError: the configuration selects an attention mechanism.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        size: int,
        window: int,
        position: RelativeBuckets,
        scores: ScoreRule = ScoreRule(),  # noqa: B008
    ):
        config = parts.config
        if config.attn_mechanism != "auto":
            raise ConfigError(
                f"attn_mechanism={config.attn_mechanism!r} cannot read summaries of blocks, which "
                "this model needs; use 'auto'"
            )
        mask = MaskRule(causal=False, window=window)
        super().__init__(parts, position=position, mask=mask, scores=scores)
        self.summary_norm = parts.own_norm(config.hidden_size)
        self.size, self.window, self.max_distance = size, window, position.max_distance

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: _CacheT, layer: Layer
    ) -> tuple[Float[Array, "b s d"], _CacheT]:
        """Return the output of the attention [b, s, d], and the cache.

        Raises:
            ConfigError: the call has a cache, or the context has no tables of buckets.
        """
        mask_info = bidirectional(ctx.mask_info, cache)
        if x.shape[1] < self.size:  # no segment has a block
            return super().__call__(x, ctx, cache, layer)
        x = ctx.name_activation(x, "normed_input")
        blocks = Blocks.of(mask_info, self.size)
        q, k, v = self.compute_qkv(x, ctx)
        summaries = self.summary_norm(blocks.sums(x))
        far_projections = project((self.k_proj, self.v_proj), summaries, ctx)
        far_k, far_v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in far_projections)
        out = self.attend_to_summaries(q, (k, far_k), (v, far_v), mask_info, blocks, ctx)
        out = ctx.name_activation(out, "attn_output")
        return ctx.name_activation(
            self.o_proj(out.reshape(*x.shape[:2], -1), ctx), "attn_dense"
        ), cache

    def attend_to_summaries(
        self,
        q: Float[Array, "b s h k"],
        keys: tuple[Float[Array, "b s g k"], Float[Array, "b m g k"]],
        values: tuple[Float[Array, "b s g k"], Float[Array, "b m g k"]],
        mask_info: MaskInfo,
        blocks: Blocks,
        ctx: Ctx,
    ) -> Float[Array, "b s h k"]:
        """Return the weighted sums of the values of tokens and summaries."""
        (b, s, h, _), out_dtype = q.shape, q.dtype
        w, dtype, scale = self.window, self.mechanism.softmax_dtype, self.scoring(ctx).scale
        repeat = h // keys[0].shape[2]
        (k, far_k), (v, far_v) = jax.tree.map(lambda x: jnp.repeat(x, repeat, 2), (keys, values))
        if self.mechanism.dtype is not None:
            q, k, v, far_k, far_v = (
                x.astype(self.mechanism.dtype) for x in (q, k, v, far_k, far_v)
            )
        q, k, v = _windows(q, w), with_neighbours(k, w), with_neighbours(v, w)
        near_scores = jnp.einsum("bnxhk,bnyhk->bnhxy", q, k, preferred_element_type=dtype)
        far = jnp.einsum("bnxhk,bmhk->bnhxm", q, far_k, preferred_element_type=dtype)
        bias, far_bias = self.biases(ctx, blocks, h)
        scores = jnp.concatenate([near_scores * scale + bias, far * scale + far_bias], axis=-1)
        sees = _visible(mask_info, blocks, w)[:, :, None]
        scores = jnp.where(sees, scores, jnp.finfo(dtype).min)
        weights = jnp.where(sees, jax.nn.softmax(scores, axis=-1), 0)
        weights = drop_weights(weights, ctx.key, self.mechanism.dropout).astype(v.dtype)
        out = jnp.einsum("bnhxy,bnyhk->bnxhk", weights[..., : 3 * w], v)
        out = out + jnp.einsum("bnhxm,bmhk->bnxhk", weights[..., 3 * w :], far_v)
        return out.reshape(b, -1, h, out.shape[-1])[:, :s].astype(out_dtype)

    def biases(
        self, ctx: Ctx, blocks: Blocks, heads: int
    ) -> tuple[Float[Array, "1 1 h w y"], Float[Array, "b n h w m"]]:
        """Return the biases of the scores of tokens and of summaries.

        Raises:
            ConfigError: the context has no table of buckets.
        """
        if ctx.summary_buckets is None:
            raise ConfigError(
                "this layer reads summaries of blocks, but the context has no table of them: the "
                "body must set Ctx.summary_buckets"
            )
        w, head_indices = self.window, get_head_indices(heads, 1)
        tokens = RelativeBias(get_bucket_table(ctx), self.max_distance, causal=False)
        near_bias = tokens.bias(head_indices, jnp.arange(w)[None], jnp.arange(-w, 2 * w)[None])
        summaries = RelativeBias(ctx.summary_buckets, self.max_distance, causal=False)
        far = summaries.bias(head_indices, blocks.block_numbers, blocks.index)[:, :, 0]
        return near_bias[:, None, :, 0], _windows(far.swapaxes(1, 2), w).swapaxes(2, 3)


def _visible(mask_info: MaskInfo, blocks: Blocks, window: int) -> Bool[Array, "b n w y"]:
    """Return which tokens of three windows, and which summaries, each token sees."""
    mine = _windows(mask_info.q_segment_ids, window)[..., None]
    theirs = with_neighbours(mask_info.kv_segment_ids, window)[:, :, None]
    ahead = jnp.arange(-window, 2 * window) - jnp.arange(window)[:, None]
    near_mask = (mine == theirs) & (jnp.abs(ahead) < window)
    far = mine == blocks.segment_ids[:, None, None]
    return jnp.concatenate([near_mask, far], axis=-1) & (mine != 0)


def drop_weights(
    weights: Float[Array, "b n h w y"], key: jax.Array | None, rate: float
) -> Float[Array, "b n h w y"]:
    """Apply dropout to the weights; a `key` of None leaves them unchanged."""
    if key is None or not rate:
        return weights
    places = jnp.meshgrid(*(jnp.arange(n) for n in weights.shape), indexing="ij", sparse=True)
    row, window, head, query, position = places
    stays = compute_dropout_mask(key, rate, row, head, window * weights.shape[3] + query, position)
    return jnp.where(stays, weights / (1 - rate), 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """The blocks of the tokens of rows.

    Attributes:
        slot: summary to which each token belongs, [b, s]; m = none.
        block_numbers: number of each token's block in its segment, [b, s].
        index: number of each summary's block in its segment, [b, m].
        segment_ids: segment of each summary, [b, m]; 0 = the summary does not exist.
    """

    slot: Int[Array, "b s"]
    block_numbers: Int[Array, "b s"]
    index: Int[Array, "b m"]
    segment_ids: Int[Array, "b m"]

    @classmethod
    def of(cls, mask_info: MaskInfo, size: int) -> Blocks:
        """Return the blocks of `size` tokens."""
        segments, index = mask_info.q_segment_ids, mask_info.q_index
        b, s = segments.shape
        m = s // size
        ends = (segments != 0) & (index % size == size - 1)
        # The number of complete blocks before a token.
        complete_blocks = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends
        at = jnp.arange(b)[:, None], jnp.where(ends, complete_blocks, m)
        empty = jnp.zeros((b, m + 1), jnp.int32)
        owner = empty.at[at].set(segments, mode="drop").at[:, m].set(0)
        number = empty.at[at].set(index // size, mode="drop")
        # The tokens that remain at the end of a segment belong to its last complete block.
        remains = jnp.take_along_axis(owner, complete_blocks, axis=1) != segments
        slot = jnp.where(remains, complete_blocks - 1, complete_blocks)
        slot_segments = jnp.take_along_axis(owner, jnp.maximum(slot, 0), axis=1)
        slot = jnp.where((slot >= 0) & (slot_segments == segments) & (segments != 0), slot, m)
        block_numbers = jnp.take_along_axis(number, slot, axis=1)
        return cls(slot, block_numbers, number[:, :m], owner[:, :m])

    def sums(self, x: Float[Array, "b s d"]) -> Float[Array, "b m d"]:
        """Return the sum of the hidden states of each block."""
        b, m = self.index.shape
        empty = jnp.zeros((b, m + 1, x.shape[-1]), jnp.float32)
        total = empty.at[jnp.arange(b)[:, None], self.slot].add(x.astype(jnp.float32))
        return total[:, :m].astype(x.dtype)


def _windows(x: Array, size: int) -> Array:
    """Return [b, n, w, ...] of x, [b, s, ...], padded with zeros."""
    x = pad_axis(x, 1, -x.shape[1] % size)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def with_neighbours(x: Array, size: int) -> Array:
    """Return the windows of x together with those before and after them, [b, n, 3 w, ...]."""
    x = _windows(x, size)
    x = jnp.pad(x, [(0, 0), (1, 1), *[(0, 0)] * (x.ndim - 2)])
    return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
