"""Sparse attention with an index (DeepSeek-V3.2, 2025): small heads score all keys of a query, and
attention reads only the best keys.

In one order of sums (`ed_layers.fixed_order`), prompts, caches and pages compute each token alone,
from as many keys in the same order. Otherwise only pages do.

Legend: b batch, s queries, t keys, d hidden, a size of a compressed query, i heads of the index,
k head dim of the index, h heads of attention, l latent, p rotary size, c selected keys per query,
T flat tokens, n slots of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ed_layers import fixed_order, sums
from ed_layers.attention.scoring import pad_axis
from ed_layers.cache import LayerCacheSpec
from ed_layers.cache.codes import Codes, decode_numbers
from ed_layers.cache.protocol import Pages
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.storage import Layer
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.parts import Parts
from ed_layers.projections.matmul import matmul
from ed_layers.rotary import apply_rotary

#: Number of queries whose scores [b, queries, i, t] exist at the same time.
QUERY_BLOCK = 128
#: Number of tokens of a flat batch that gather the keys of their sequences at the same time.
TOKEN_BLOCK = 16


@dataclass(frozen=True)
class Places:
    """The keys that each token attends to, one after another.

    Attributes:
        position: position of the key in the sequence of the token.
        real: whether the entry holds a key; a token that sees fewer than c keys has unused entries.
    """

    position: Int[Array, "T c"]
    real: Bool[Array, "T c"]


#: The result of an index: a bias [b, 1, s, t] that hides the keys which were not selected; places;
#: or None if the sequence has no more than c keys.
Chosen = jax.Array | Places | None


class Vectors(NamedTuple):
    """Stored vectors, which each token reads by position.

    Attributes:
        read: returns the vectors [n, k] at n positions, from the row of a token.
        rows: row of each token, [T] or [T, pages].
        length: number of positions in a row.
    """

    read: Callable[[jax.Array, jax.Array], jax.Array]
    rows: jax.Array
    length: int


def in_pages(pages: Pages, ragged: RaggedBatch, dtype: DTypeLike) -> Vectors:
    """Return the vectors in the pages of a flat batch."""
    table = pages_of_tokens(pages, ragged)
    return Vectors(
        partial(read_tokens, pages, dtype=dtype), table, table.shape[1] * get_page_size(pages)
    )


def in_rows(x: Float[Array, "b t k"], queries: int) -> Vectors:
    """Return the vectors of a batch whose rows have the same number of queries."""
    rows = jnp.repeat(jnp.arange(x.shape[0]), queries)
    return Vectors(lambda row, slots: x[row, slots], rows, x.shape[1])


class Indexer(nnx.Module):
    """Selects the `index_topk` keys that a query attends to.

    Parameters have Hugging Face's names: `wq_b`, `wk`, `k_norm`, `weights_proj`. The score of a key
    is `sum_i w_i relu(q_i . k)` in float32. The selection has no gradient. A cache stores the keys
    of the index in the group "index".

    The configuration provides the sizes: `index_n_heads`, `index_head_dim`, `qk_rope_head_dim`.

    Args:
        parts: creates the projections.
        interleaved: rotary pairs are adjacent elements instead of halves.
    """

    def __init__(self, parts: Parts, *, interleaved: bool):
        config = parts.config
        d, heads, k = config.hidden_size, config.index_n_heads, config.index_head_dim
        self.wq_b = parts.linear(config.q_lora_rank, heads * k, axes=("embed", "heads"))
        self.wk = parts.linear(d, k, axes=("embed", None))
        self.k_norm = parts.layer_norm(k, eps=1e-6)
        exact = replace(parts, dtype=jnp.float32)
        self.weights_proj = exact.linear(d, heads, axes=("embed", "heads"))
        self.heads, self.interleaved, self.kept = heads, interleaved, config.index_topk
        self.scale = k**-0.5
        self.cache_spec = LayerCacheSpec(1, k, group="index", values_in_keys=True)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        compressed: Float[Array, "b s a"],
        ctx: Ctx,
        cache: Any,
        layer: Layer,
    ) -> tuple[Chosen, Any]:
        """Return the selected keys and the cache."""
        x, compressed = jax.lax.stop_gradient((x, compressed))
        new, mask = self.keys(x, ctx), ctx.mask_info
        group = self.cache_spec.group
        if ctx.ragged is not None:
            cache, pages = cache.update(layer, (new, None), ragged=ctx.ragged, group=group)
            stored = in_pages(pages, ctx.ragged, new.dtype)
            if self.is_short(stored.length):
                return None, cache
            seen = jnp.arange(stored.length) <= ctx.ragged.positions()[0][:, None]
            seen &= ctx.ragged.real()[:, None]
            q, weights = self.queries(x, compressed, ctx)
            return self.places(q[0], weights[0], stored, seen), cache
        keys = new[:, :, 0]
        if cache is not None:
            cache, stored_layer = cache.update(layer, (new, None), mask_info=mask, group=group)
            keys, mask = decode_numbers(stored_layer.k, new.dtype)[:, 0], stored_layer.mask_info
        if self.is_short(keys.shape[1]):
            return None, cache
        assert mask is not None, "only a flat batch has no mask"
        q, weights = self.queries(x, compressed, ctx)
        seen = mask.get_mask()
        if not fixed_order.active():
            return self.bias(q, weights, keys, seen), cache
        stored = in_rows(keys, x.shape[1])
        return self.places(by_token(q), by_token(weights), stored, by_token(seen)), cache

    def is_short(self, count: int) -> bool:
        """Return whether tokens attend to all keys, because none has more than the index selects.
        In one order of sums the computation must not depend on the size of a cache."""
        return count <= self.kept and not fixed_order.active()

    def queries(
        self, x: Float[Array, "b s d"], compressed: Float[Array, "b s a"], ctx: Ctx
    ) -> tuple[Float[Array, "b s i k"], Float[Array, "b s i"]]:
        """Return the rotated queries of all heads, and the weights of the heads."""
        q = self.wq_b(compressed, ctx).reshape(*x.shape[:2], self.heads, -1)
        q = apply_rotary(q, ctx.rope[ALL_LAYERS], interleaved=self.interleaved)
        weights = self.weights_proj(x, ctx) * (self.scale * self.heads**-0.5)
        return jax.lax.stop_gradient((q, weights))

    def keys(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s 1 k"]:
        """Return the rotated keys, which all heads share."""
        k = self.k_norm(self.wk(x, ctx))[:, :, None]
        k = apply_rotary(k, ctx.rope[ALL_LAYERS], interleaved=self.interleaved)
        return jax.lax.stop_gradient(k)

    def bias(
        self,
        q: Float[Array, "b s i k"],
        weights: Float[Array, "b s i"],
        keys: Float[Array, "b t k"],
        seen: Bool[Array, "b s t"],
    ) -> Float[Array, "b 1 s t"]:
        """Return a bias: 0 for the best visible keys of each query, a large negative number for all
        other keys."""
        s, size = q.shape[1], QUERY_BLOCK

        def block(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, weights, seen = part
            scores = jnp.where(seen, compute_scores(q, weights, keys), -jnp.inf)
            best = jax.lax.top_k(scores, self.kept)[1]
            rows, queries = jnp.indices(best.shape[:2], sparse=True)
            low = jnp.full(scores.shape, -1e30, jnp.float32)
            return low.at[rows[..., None], queries[..., None], best].set(0.0)

        if s <= size:
            return block((q, weights, seen))[:, None]

        def split_blocks(x: jax.Array) -> jax.Array:
            x = pad_axis(x, 1, -s % size)
            return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

        blocks = jax.lax.map(block, (split_blocks(q), split_blocks(weights), split_blocks(seen)))
        return jnp.moveaxis(blocks, 0, 1).reshape(q.shape[0], 1, -1, keys.shape[1])[:, :, :s]

    def places(
        self,
        q: Float[Array, "T i k"],
        weights: Float[Array, "T i"],
        stored: Vectors,
        seen: Bool[Array, "T n"],
    ) -> Places:
        """Return the best keys of each token among those that it sees."""
        slots, missing = jnp.arange(stored.length), max(0, self.kept - stored.length)

        def token(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, weights, row, seen = part
            head_scores = jax.nn.relu(_products(q, stored.read(row, slots))) * weights[:, None]
            scores = jnp.where(seen, sums.over_axis(head_scores, 0), -jnp.inf)
            scores = jnp.pad(scores, (0, missing), constant_values=-jnp.inf)
            best, at = jax.lax.top_k(scores, self.kept)
            if not fixed_order.active():
                return at, best > -jnp.inf
            at = jnp.sort(jnp.where(best > -jnp.inf, at, stored.length))
            return at, at < stored.length

        return Places(*by_tokens(token, (q, weights, stored.rows, seen)))


def compute_scores(
    q: Float[Array, "b s i k"], weights: Float[Array, "b s i"], keys: Float[Array, "b t k"]
) -> Float[Array, "b s t"]:
    """Return the weighted sum of the scores of all index heads for each key, float32."""
    head_scores = jnp.einsum("bsik,btk->bsit", q, keys, preferred_element_type=jnp.float32)
    return jnp.einsum("bsit,bsi->bst", jax.nn.relu(head_scores), weights)


def attend_to_places(
    q: Float[Array, "T h l+p"], places: Places, stored: Vectors, scale: float, value_dim: int
) -> Float[Array, "T h l"]:
    """Attend from each token to its selected latents; other latents are not read. The result of a
    token without keys is 0.

    Args:
        q: absorbed queries.
        stored: latents.
        scale: factor on the scores.
        value_dim: l.
    """

    def token(part: tuple[jax.Array, ...]) -> jax.Array:
        q, row, position, real = part
        latents = stored.read(row, position)
        scores = jnp.where(real, _products(q, latents) * scale, -1e30)
        weights = jnp.where(real, sums.softmax(scores), 0)
        return _products(weights.astype(q.dtype), latents[:, :value_dim].T).astype(q.dtype)

    return by_tokens(token, (q, stored.rows, places.position, places.real))


def _products(a: Float[Array, "m k"], b: Float[Array, "n k"]) -> Float[Array, "m n"]:
    """Return the products of all pairs of vectors, float32."""
    if fixed_order.active():
        return matmul(a.astype(jnp.float32), b.astype(jnp.float32), transposed=True)
    return jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.float32)


def by_token(x: Float[Array, "b s *rest"]) -> Float[Array, " T *rest"]:
    """Return the rows of a batch as one sequence of tokens."""
    return x.reshape(-1, *x.shape[2:])


def by_tokens(function: Callable[[Any], Any], tokens: tuple[jax.Array, ...]) -> Any:
    """Map a function of one token over all tokens, in chunks that bound the gathered memory; in one
    order of sums, each token alone."""
    chunk = None if fixed_order.active() else min(TOKEN_BLOCK, tokens[0].shape[0])
    return jax.lax.map(function, tokens, batch_size=chunk)


def pages_of_tokens(pages: Pages, ragged: RaggedBatch) -> Int[Array, "T pages"]:
    """Return the pages of the sequence of each token."""
    table = ragged.page_table[pages.group]
    return table[jnp.clip(ragged.seq_of_token, 0, table.shape[0] - 1)]


def get_page_size(pages: Pages) -> int:
    """Return the number of tokens in a page; a pool has shape [.., P, page_size, g, 1, k]."""
    return pages.pool.shape[-4]


def read_tokens(
    pages: Pages, row: Int[Array, " pages"], slots: Int[Array, " n"], dtype: DTypeLike
) -> Float[Array, "n k"]:
    """Return the stored latents of some tokens of a sequence.

    Args:
        row: pages of the sequence.
        slots: positions in the sequence.
    """
    page, offset = jnp.divmod(slots, get_page_size(pages))
    at = (*pages.at, row[page])
    if not isinstance(pages.pool, Codes):
        return pages.pool[(*at, offset, 0, 0)].astype(dtype)
    values = pages.pool.values[(*at, offset, 0, 0)]
    scale = pages.pool.scale[(*at, 0, 0, slice(None), offset)]
    return decode_numbers(Codes(values[:, None], scale[..., None]), dtype)[:, 0]
