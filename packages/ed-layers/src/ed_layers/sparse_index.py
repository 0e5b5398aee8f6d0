"""Sparse attention by an index (DeepSeek-V3.2, 2025): small heads score all keys of a query, and
attention reads the best of them.

Legend: b batch, s queries, t keys, d hidden, a numbers of a compressed query, i heads of the index,
k numbers of one, h heads of attention, l latent, p turned numbers, c keys of a query that are kept,
T flat tokens, n slots of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ed_layers.attention.scoring import padded
from ed_layers.cache import LayerCacheSpec
from ed_layers.cache.codes import Codes, decode
from ed_layers.cache.protocol import Pages
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.storage import Layer
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.parts import Parts
from ed_layers.rotary import apply_rotary

#: Queries whose scores [b, queries, i, t] are there at a time.
QUERY_BLOCK = 128
#: Tokens of a flat batch that gather their sequences' keys at a time.
TOKEN_BLOCK = 16


@dataclass(frozen=True)
class Places:
    """The keys of each token of a flat batch that it attends to.

    Attributes:
        position: of the key in the token's sequence.
        real: whether there is one: a token that sees fewer than c keys has places to spare.
    """

    position: Int[Array, "T c"]
    real: Bool[Array, "T c"]


#: What an index says: a bias [b, 1, s, t] that hides keys which were not chosen; places in pages;
#: or None where every key is kept because there are no more.
Chosen = jax.Array | Places | None


class Indexer(nnx.Module):
    """Chooses the `index_topk` keys that a query sees.

    Hugging Face's names: `wq_b`, `wk`, `k_norm`, `weights_proj`. The score of a key is
    `sum_i w_i relu(q_i . k)`, in float32. The choice has no gradient. A cache keeps the keys of the
    index in the group "index".

    Sizes come from the configuration: `index_n_heads`, `index_head_dim`, `qk_rope_head_dim`.

    Args:
        parts: makes the projections.
        interleaved: rotary pairs are neighbours, not halves.
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
        """Choose keys; returns them and the cache."""
        x, compressed = jax.lax.stop_gradient((x, compressed))
        new, mask = self.keys(x, ctx), ctx.mask_info
        group = self.cache_spec.group
        if ctx.ragged is not None:
            cache, pages = cache.update(layer, (new, None), ragged=ctx.ragged, group=group)
            q, weights = self.queries(x, compressed, ctx)
            return self.places(q[0], weights[0], pages, ctx.ragged), cache
        keys = new[:, :, 0]
        if cache is not None:
            cache, stored = cache.update(layer, (new, None), mask_info=mask, group=group)
            keys, mask = decode(stored.k, new.dtype)[:, 0], stored.mask_info
        if keys.shape[1] <= self.kept:
            return None, cache
        assert mask is not None, "only a flat batch has no mask"
        q, weights = self.queries(x, compressed, ctx)
        return self.bias(q, weights, keys, mask.allowed()), cache

    def queries(
        self, x: Float[Array, "b s d"], compressed: Float[Array, "b s a"], ctx: Ctx
    ) -> tuple[Float[Array, "b s i k"], Float[Array, "b s i"]]:
        """Queries of all heads, turned, and the weights of the heads."""
        q = self.wq_b(compressed, ctx).reshape(*x.shape[:2], self.heads, -1)
        q = apply_rotary(q, ctx.rope[ALL_LAYERS], interleaved=self.interleaved)
        weights = self.weights_proj(x, ctx) * (self.scale * self.heads**-0.5)
        return jax.lax.stop_gradient((q, weights))

    def keys(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s 1 k"]:
        """Turned keys, one for all heads."""
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
        """0 for the best keys of each query among those it may see, and so low a number for the
        others that nothing is left of them."""
        s, size = q.shape[1], QUERY_BLOCK

        def block(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, weights, seen = part
            scores = jnp.where(seen, scores_of(q, weights, keys), -jnp.inf)
            best = jax.lax.top_k(scores, self.kept)[1]
            rows, queries = jnp.indices(best.shape[:2], sparse=True)
            low = jnp.full(scores.shape, -1e30, jnp.float32)
            return low.at[rows[..., None], queries[..., None], best].set(0.0)

        if s <= size:
            return block((q, weights, seen))[:, None]

        def cut(x: jax.Array) -> jax.Array:
            x = padded(x, 1, -s % size)
            return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

        blocks = jax.lax.map(block, (cut(q), cut(weights), cut(seen)))
        return jnp.moveaxis(blocks, 0, 1).reshape(q.shape[0], 1, -1, keys.shape[1])[:, :, :s]

    def places(
        self,
        q: Float[Array, "T i k"],
        weights: Float[Array, "T i"],
        pages: Pages,
        ragged: RaggedBatch,
    ) -> Places | None:
        """The best keys of each token in the pages of its sequence."""
        table = pages_of_tokens(pages, ragged)
        slots = jnp.arange(table.shape[1] * page_size_of(pages))
        if slots.shape[0] <= self.kept:
            return None

        def token(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, weights, row, position = part
            keys = tokens_of(pages, row, slots, q.dtype)
            scores = scores_of(q[None, None], weights[None, None], keys[None])[0, 0]
            best, at = jax.lax.top_k(jnp.where(slots <= position, scores, -jnp.inf), self.kept)
            return at, best > -jnp.inf

        return Places(*by_tokens(token, (q, weights, table, ragged.positions()[0])))


def scores_of(
    q: Float[Array, "b s i k"], weights: Float[Array, "b s i"], keys: Float[Array, "b t k"]
) -> Float[Array, "b s t"]:
    """What the heads of an index say of each key together, float32."""
    each = jnp.einsum("bsik,btk->bsit", q, keys, preferred_element_type=jnp.float32)
    return jnp.einsum("bsit,bsi->bst", jax.nn.relu(each), weights)


def attend_to_places(
    q: Float[Array, "T h l+p"],
    places: Places,
    pages: Pages,
    ragged: RaggedBatch,
    scale: float,
) -> Float[Array, "T h l"]:
    """Attention of each token to the latents at its own places: those alone are read.

    Args:
        q: absorbed queries.
        pages: of latents.
        scale: factor on the scores.
    """
    value_dim = pages.value_dim or q.shape[-1]

    def token(part: tuple[jax.Array, ...]) -> jax.Array:
        q, row, position, real = part
        latents = tokens_of(pages, row, position, q.dtype)
        scores = jnp.einsum("hk,ck->hc", q, latents, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(real, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hc,cl->hl", weights.astype(q.dtype), latents[:, :value_dim])

    table = pages_of_tokens(pages, ragged)
    out = by_tokens(token, (q, table, places.position, places.real))
    return jnp.where(ragged.real()[:, None, None], out, 0)


def by_tokens(function: Callable[[Any], Any], tokens: tuple[jax.Array, ...]) -> Any:
    """A function of one token, of many: so many at a time that what they gather is small."""
    return jax.lax.map(function, tokens, batch_size=min(TOKEN_BLOCK, tokens[0].shape[0]))


def pages_of_tokens(pages: Pages, ragged: RaggedBatch) -> Int[Array, "T pages"]:
    """The pages of each token's sequence."""
    table = ragged.page_table[pages.group]
    return table[jnp.clip(ragged.seq_of_token, 0, table.shape[0] - 1)]


def page_size_of(pages: Pages) -> int:
    """Tokens of a page; a pool is [.., P, page_size, g, 1, k]."""
    return pages.pool.shape[-4]


def tokens_of(
    pages: Pages, row: Int[Array, " pages"], slots: Int[Array, " n"], dtype: Any
) -> Float[Array, "n k"]:
    """What is stored of some tokens of a sequence, where keys hold the values.

    Args:
        row: pages of the sequence.
        slots: positions in the sequence.
    """
    page, offset = jnp.divmod(slots, page_size_of(pages))
    at = (*pages.at, row[page])
    if not isinstance(pages.pool, Codes):
        return pages.pool[(*at, offset, 0, 0)].astype(dtype)
    values = pages.pool.values[(*at, offset, 0, 0)]
    scale = pages.pool.scale[(*at, 0, 0, slice(None), offset)]
    return decode(Codes(values[:, None], scale[..., None]), dtype)[:, 0]
