"""Sparse attention with an index (DeepSeek-V3.2, 2025): small heads score all keys of a query, and
attention reads only the best keys.

Legend: b batch, s queries, t keys, d hidden, a size of a compressed query, i heads of the index,
k head dim of the index, h heads of attention, l latent, p rotary size, c selected keys per query,
T flat tokens, n slots of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
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

#: Number of queries whose scores [b, queries, i, t] exist at the same time.
QUERY_BLOCK = 128
#: Number of tokens of a flat batch that gather the keys of their sequences at the same time.
TOKEN_BLOCK = 16


@dataclass(frozen=True)
class Places:
    """The keys that each token of a flat batch attends to.

    Attributes:
        position: position of the key in the sequence of the token.
        real: whether the entry holds a key; a token that sees fewer than c keys has unused entries.
    """

    position: Int[Array, "T c"]
    real: Bool[Array, "T c"]


#: The result of an index: a bias [b, 1, s, t] that hides the keys which were not selected;
#: positions in pages; or None if the sequence has no more than c keys.
Chosen = jax.Array | Places | None


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
        """Return the best keys of each token in the pages of its sequence."""
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
    """Return the weighted sum of the scores of all index heads for each key, float32."""
    each = jnp.einsum("bsik,btk->bsit", q, keys, preferred_element_type=jnp.float32)
    return jnp.einsum("bsit,bsi->bst", jax.nn.relu(each), weights)


def attend_to_places(
    q: Float[Array, "T h l+p"],
    places: Places,
    pages: Pages,
    ragged: RaggedBatch,
    scale: float,
) -> Float[Array, "T h l"]:
    """Attend from each token to its selected latents; other latents are not read.

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
    """Map a function of one token over all tokens, in chunks that bound the gathered memory."""
    return jax.lax.map(function, tokens, batch_size=min(TOKEN_BLOCK, tokens[0].shape[0]))


def pages_of_tokens(pages: Pages, ragged: RaggedBatch) -> Int[Array, "T pages"]:
    """Return the pages of the sequence of each token."""
    table = ragged.page_table[pages.group]
    return table[jnp.clip(ragged.seq_of_token, 0, table.shape[0] - 1)]


def page_size_of(pages: Pages) -> int:
    """Return the number of tokens in a page; a pool has shape [.., P, page_size, g, 1, k]."""
    return pages.pool.shape[-4]


def tokens_of(
    pages: Pages, row: Int[Array, " pages"], slots: Int[Array, " n"], dtype: DTypeLike
) -> Float[Array, "n k"]:
    """Return the stored latents of some tokens of a sequence.

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
