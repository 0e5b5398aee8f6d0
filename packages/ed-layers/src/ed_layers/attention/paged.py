"""Attention over pages in plain XLA: decode for all sequences at once, prefill one by one.

Both parts run an online softmax over blocks of pages for as many blocks as the real context has,
whatever the page table could hold. No gradient: pages are for serving.

Legend: T flat tokens, n sequences, p pages per sequence, h heads, g kv heads, r heads per kv head,
k head dim, x queries in a block, y keys in a block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.partial import normalised
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.codes import Codes, decode
from ed_layers.cache.paged import Pages
from ed_layers.cache.ragged import RaggedBatch

# Keys per step of the online softmax, and queries per block of a prefill.
KEY_BLOCK = 128
QUERY_BLOCK = 128


def paged_attention(
    q: Float[Array, "T h k"],
    pages: Pages,
    ragged: RaggedBatch,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "T h k"]:
    """Causal attention of a flat batch; see `attend`. Padding tokens get zeros."""
    tokens, heads, head_dim = q.shape
    groups = pages.pool.shape[-3]
    q = (q * scoring.scale).reshape(tokens, groups, heads // groups, head_dim)
    reader = PageReader(
        pages, ragged.page_table[pages.group], scoring, head_dim, pages.value_dim or head_dim
    )
    value_dim = pages.value_dim or head_dim
    out = jnp.zeros((*q.shape[:-1], value_dim), scoring.softmax_dtype)
    out = decode_all(q, reader, ragged, out)
    if not ragged.decode_only:
        out = prefill_each(q, reader, ragged, out)
    return out.reshape(tokens, heads, value_dim).astype(q.dtype)


class PageReader:
    """Gathers a block of pages and runs one step of the online softmax on it.

    Args:
        head_dim, value_dim: numbers of a key and of a value; pages are as wide as the wider one.
    """

    def __init__(
        self, pages: Pages, table: jax.Array, scoring: Scoring, head_dim: int, value_dim: int
    ):
        self.pages, self.at, self.scoring = pages.pool, pages.at, scoring
        self.head_dim, self.value_dim = head_dim, value_dim
        self.window, self.chunk = scoring.window, scoring.chunk
        self.softmax_dtype = scoring.softmax_dtype
        self.groups = self.pages.shape[-3]
        self.sinks = None
        if scoring.sinks is not None:
            self.sinks = scoring.sinks.reshape(self.groups, -1)[:, :, None, None]
        page_size = self.pages.shape[-4]
        # Two blocks at least: XLA moves the read of a single one out of the loop, merges it with
        # the write before it, and then copies the pool (seen on a CPU).
        width = max(table.shape[1], 2)
        self.pages_per_block = max(1, min(KEY_BLOCK // page_size, -(-width // 2)))
        self.block = self.pages_per_block * page_size
        width += -width % self.pages_per_block
        self.table = jnp.pad(table, ((0, 0), (0, width - table.shape[1])))

    def keys_values(self, rows: jax.Array, j: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Block j of the sequences with these page-table rows [m, p]: [m, y, g, k], [m, y, g, d].

        Quantized pages become numbers of `dtype`, a block at a time.
        """
        page = jax.lax.dynamic_slice_in_dim(rows, j * self.pages_per_block, self.pages_per_block, 1)
        kv = jax.tree.map(lambda pages: pages[(*self.at, page)], self.pages)
        if isinstance(kv, Codes):
            # Slots before numbers, and after scales, as `decode` has them.
            values = jnp.moveaxis(kv.values, 2, 4)
            kv = jnp.moveaxis(decode(Codes(values, kv.scale), dtype), 4, 2)
        kv = kv.reshape(rows.shape[0], self.block, *self.pages.shape[-3:])
        return kv[..., 0, : self.head_dim], kv[..., -1, : self.value_dim]

    def attend(self, q, rows, position, valid, first_block, last_block) -> jax.Array:
        """Online softmax of q [m, x, g, r, k] over blocks `first_block` to `last_block`.

        Args:
            rows: page-table rows, [m, p].
            position: of each query in its sequence, [m, x].
            valid: which queries are real, [m, x].
        """

        def step(j, carry):
            top, total, acc = carry
            k, v = self.keys_values(rows, j, q.dtype)
            scores = jnp.einsum("mxgrk,mygk->mgrxy", q, k).astype(self.softmax_dtype)
            scores, _ = self.scoring.cap(scores)
            at = j * self.block + jnp.arange(self.block)
            allowed = self.allowed(position, at) & valid[:, :, None]
            scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            anchor = jnp.where(jnp.isfinite(new_top), new_top, 0)
            weights = jnp.exp(scores - anchor)
            decay = jnp.exp(top - anchor)
            total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
            acc = acc * decay + jnp.einsum("mgrxy,mygk->mgrxk", weights.astype(v.dtype), v)
            return new_top, total, acc

        m, x, groups, repeat, _ = q.shape
        rows_shape = (m, groups, repeat, x)
        start = (
            jnp.full((*rows_shape, 1), -jnp.inf, self.softmax_dtype),
            jnp.zeros((*rows_shape, 1), self.softmax_dtype),
            jnp.zeros((*rows_shape, self.value_dim), self.softmax_dtype),
        )
        part = jax.lax.fori_loop(first_block, last_block, step, start)
        return normalised(part, self.sinks).transpose(0, 3, 1, 2, 4)

    def allowed(self, position: jax.Array, at: jax.Array) -> jax.Array:
        """Causal, and within the window and chunk: [m, x, y]."""
        query = position[:, :, None]
        ok = at <= query
        if self.window is not None:
            ok &= (query - at < self.window) | (jnp.asarray(self.window) <= 0)
        if self.chunk is not None:
            size = jnp.maximum(jnp.asarray(self.chunk), 1)
            ok &= (query // size == at // size) | (jnp.asarray(self.chunk) <= 0)
        return ok

    def first_block(self, position: jax.Array) -> jax.Array:
        """The first block that a query at `position` may see."""
        start = jnp.zeros_like(position)
        if self.window is not None:
            near = jnp.maximum(position - self.window + 1, 0)
            start = jnp.where(jnp.asarray(self.window) > 0, near, start)
        if self.chunk is not None:
            size = jnp.maximum(jnp.asarray(self.chunk), 1)
            own = jnp.maximum(position // size * size, start)
            start = jnp.where(jnp.asarray(self.chunk) > 0, own, start)
        return start // self.block


def decode_all(q, reader: PageReader, ragged: RaggedBatch, out: jax.Array) -> jax.Array:
    """Sequences with one token in this step, together."""
    at = jnp.clip(ragged.cu_q_lens[:-1], 0, q.shape[0] - 1)
    single = (ragged.q_lens == 1) & (jnp.arange(at.shape[0]) < ragged.num_seqs)
    position = jnp.where(single, ragged.kv_lens - 1, 0)
    far = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(single, reader.first_block(position), far))
    last = jnp.max(jnp.where(single, position // reader.block + 1, 0))
    rows = reader.table
    result = reader.attend(q[at][:, None], rows, position[:, None], single[:, None], first, last)
    # Index T is out of range: sequences with more tokens are left to the prefill part.
    return out.at[jnp.where(single, at, q.shape[0])].set(result[:, 0], mode="drop")


def prefill_each(q, reader: PageReader, ragged: RaggedBatch, out: jax.Array) -> jax.Array:
    """Sequences with several tokens in this step: one after another, in blocks of queries."""
    width = min(QUERY_BLOCK, q.shape[0])
    padding = ((0, width), *[(0, 0)] * 3)
    q, out = jnp.pad(q, padding), jnp.pad(out, padding)

    def sequence(i, out):
        start, q_len = ragged.cu_q_lens[i], ragged.q_lens[i]
        row = jax.lax.dynamic_slice_in_dim(reader.table, i, 1, 0)

        def block(x, out):
            offset = x * width + jnp.arange(width)
            valid = offset < q_len
            position = ragged.kv_lens[i] - q_len + offset
            at = start + x * width
            q_x = jax.lax.dynamic_slice_in_dim(q, at, width, 0)
            last_position = jnp.max(jnp.where(valid, position, 0))
            result = reader.attend(
                q_x[None],
                row,
                position[None],
                valid[None],
                reader.first_block(position[0]),
                last_position // reader.block + 1,
            )[0]
            # The rows behind a short block belong to the next sequence.
            before = jax.lax.dynamic_slice_in_dim(out, at, width, 0)
            kept = jnp.where(valid[:, None, None, None], result, before)
            return jax.lax.dynamic_update_slice_in_dim(out, kept, at, 0)

        blocks = jnp.where(q_len > 1, (q_len + width - 1) // width, 0)
        return jax.lax.fori_loop(0, blocks, block, out)

    return jax.lax.fori_loop(0, ragged.num_seqs, sequence, out)[:-width]
