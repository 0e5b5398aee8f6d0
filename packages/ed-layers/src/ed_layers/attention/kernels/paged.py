"""Attention over pages in plain XLA: decoding of all sequences together, prefill one by one.

The loops visit as many blocks of pages as the longest context has, not as many as the page table
could contain. On a GPU, where a turn of such a loop costs more than reading the pages, one block
contains the whole page table if it is small.

Legend: T flat tokens, n sequences, p pages per sequence, h heads, g kv heads, r heads per kv head,
k head dim, d value dim, m sequences at hand, x queries in a block, y keys in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Paged
from ed_layers.attention.kernels.softmax import PartialAttention, over_blocks
from ed_layers.attention.kernels.visibility import visible
from ed_layers.attention.scoring import get_head_indices
from ed_layers.cache.codes import Codes, decode_numbers
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.devices import AxisNames, get_mesh_axes, get_platform
from ed_layers.projections.matmul import batch_matmul

# Keys per block, and queries per block of a prefill. On a GPU each turn of a loop launches a dozen
# kernels and waits for their end, so blocks are large.
KEY_BLOCK, GPU_KEY_BLOCK = 128, 2048
QUERY_BLOCK, GPU_QUERY_BLOCK = 128, 512
#: Maximum number of keys that a step on a GPU reads at once, of all sequences together.
GPU_STEP_KEYS = 2**17

PAGED_NAMES = ("ragged_page_attention_v3", "ragged_page_attention_v2", "page_attention")


def paged_attention(call: Paged) -> Float[Array, "T h d"]:
    """Compute causal attention of a flat batch; padding gets zeros."""
    tokens, heads, head_dim = call.q.shape
    reader = PageReader(call)
    q = (call.q * call.scoring.scale).reshape(tokens, reader.groups, -1, head_dim)
    out = jnp.zeros((*q.shape[:-1], call.value_dim), call.scoring.softmax_dtype)
    out = decode_all(q, reader, call.ragged, out)
    if not call.ragged.decode_only:
        out = prefill_each(q, reader, call.ragged, out)
    return out.reshape(tokens, heads, call.value_dim).astype(call.q.dtype)


def head_axes(call: Paged) -> AxisNames | None:
    """Return the mesh axes that split the heads of both queries and pages."""
    if call.config is None or call.config.mesh.size == 1:
        return None
    heads = (call.q.shape[0], call.pages.pool.shape[-3])
    return get_mesh_axes(call.config, (None, "heads"), heads, "decode")[1]


class PageBlocks(NamedTuple):
    """Pages and queries per block.

    Attributes:
        single_block: whether one block contains all pages of a sequence, so that no loop is needed.
    """

    pages: int
    queries: int
    single_block: bool = False

    @classmethod
    def of(cls, call: Paged, seqs: int, width: int, page_size: int) -> PageBlocks:
        """Return the sizes for a page table [seqs, width]."""
        gpu, longest = get_platform(call.config) == "gpu", width * page_size
        if gpu and longest <= 2 * GPU_KEY_BLOCK and seqs * longest <= GPU_STEP_KEYS:
            return cls(width, GPU_QUERY_BLOCK, single_block=True)
        keys, queries = KEY_BLOCK, QUERY_BLOCK
        if gpu:
            keys, queries = min(GPU_KEY_BLOCK, GPU_STEP_KEYS // seqs), GPU_QUERY_BLOCK
        # At least two blocks: XLA would move the read of a single block out of the loop, merge it
        # with the preceding write, and copy the pool (observed on a CPU).
        return cls(max(1, min(keys // page_size, -(-width // 2))), queries)


class PageReader:
    """Gathers blocks of pages for the online softmax.

    The width of a page is the larger of key and value size.
    """

    def __init__(self, call: Paged):
        self.pages, self.at, self.scoring = call.pages.pool, call.pages.at, call.scoring
        self.head_dim, self.value_dim = call.q.shape[-1], call.value_dim
        self.groups, page_size = self.pages.shape[-3], self.pages.shape[-4]
        self.sinks = None
        if self.scoring.sinks is not None:
            self.sinks = self.scoring.sinks.reshape(self.groups, -1)[:, :, None, None]
        table = call.ragged.page_table[call.pages.group]
        seqs, width = table.shape[0], max(table.shape[1], 2)
        self.blocks = PageBlocks.of(call, seqs, width, page_size)
        self.block = self.blocks.pages * page_size
        width += -width % self.blocks.pages
        self.table = jnp.pad(table, ((0, 0), (0, width - table.shape[1])))

    def keys_values(
        self, rows: jax.Array, j: jax.Array, dtype: DTypeLike
    ) -> tuple[jax.Array, jax.Array]:
        """Return keys [m, y, g, k] and values [m, y, g, d] of block j, for page-table rows [m, p].

        Quantized pages are decoded to `dtype`, one block at a time.
        """
        page = jax.lax.dynamic_slice_in_dim(rows, j * self.blocks.pages, self.blocks.pages, 1)
        kv = jax.tree.map(lambda pages: pages[(*self.at, page)], self.pages)
        if isinstance(kv, Codes):
            # Slots before numbers, and after scales, as `decode_numbers` has them.
            values = jnp.moveaxis(kv.values, 2, 4)
            kv = jnp.moveaxis(decode_numbers(Codes(values, kv.scale), dtype), 4, 2)
        kv = kv.reshape(rows.shape[0], self.block, *self.pages.shape[-3:])
        return kv[..., 0, : self.head_dim], kv[..., -1, : self.value_dim]

    def attend(self, q, rows, position, valid, first_block, last_block, ahead=None) -> jax.Array:
        """Compute attention of scaled queries [m, x, g, r, k] to `first_block` to `last_block`.

        Args:
            rows: page-table rows, [m, p].
            position: position of each query in its sequence, [m, x].
            valid: which queries are real, [m, x].
            ahead: number of later keys that each query attends to, [m, x]; None = 0.

        Returns:
            [m, x, g, r, d].
        """
        scoring = self.scoring

        def block(j: jax.Array):
            k, v = self.keys_values(rows, j, q.dtype)
            scores = batch_matmul(
                joined, k.swapaxes(1, 2), transposed=True, dtype=scoring.softmax_dtype
            )
            scores = scores.reshape(m, groups, repeat, x, self.block)
            scores, _ = scoring.cap(scores)
            at = jnp.broadcast_to(j * self.block + jnp.arange(self.block), (m, self.block))
            info = MaskInfo(valid.astype(jnp.int32), jnp.ones_like(at), position, at, ahead=ahead)
            if scoring.by_distance:
                bias = scoring.distance_bias(get_head_indices(groups, repeat), position, at)
                scores = scores + bias.astype(scores.dtype)
            allowed = info.get_mask(window=scoring.window, chunk=scoring.chunk)
            scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)

            def weighted_sum(weights: jax.Array) -> jax.Array:
                weights = weights.astype(v.dtype).reshape(m, groups, repeat * x, self.block)
                out = batch_matmul(weights, v.swapaxes(1, 2), dtype=scoring.softmax_dtype)
                return out.reshape(m, groups, repeat, x, -1)

            return scores, weighted_sum

        m, x, groups, repeat, _ = q.shape
        joined = q.transpose(0, 2, 3, 1, 4).reshape(m, groups, repeat * x, -1)
        start = PartialAttention.empty(
            (m, groups, repeat, x), self.value_dim, scoring.softmax_dtype
        )
        if self.blocks.single_block:
            part = start.and_block(*block(jnp.int32(0)))
        else:
            part = over_blocks(first_block, last_block, start, block)
        part = part if self.sinks is None else part.beside(self.sinks)
        return part.out.transpose(0, 3, 1, 2, 4)

    def blocks_seen(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the visible blocks of a query: the first, and the one after the last."""
        first, last = visible(position, position, self.scoring.window, self.scoring.chunk)
        return first // self.block, last // self.block + 1


def decode_all(q, reader: PageReader, ragged: RaggedBatch, out: jax.Array) -> jax.Array:
    """Process the sequences with one token in this step together."""
    at = jnp.clip(ragged.cu_q_lens[:-1], 0, q.shape[0] - 1)
    single = (ragged.q_lens == 1) & (jnp.arange(at.shape[0]) < ragged.num_seqs)
    position = jnp.where(single, ragged.kv_lens - 1, 0)
    first, last = reader.blocks_seen(position)
    first = jnp.min(jnp.where(single, first, jnp.iinfo(jnp.int32).max))
    last = jnp.max(jnp.where(single, last, 0))
    rows = reader.table
    result = reader.attend(q[at][:, None], rows, position[:, None], single[:, None], first, last)
    # Index T is out of range: `prefill_each` processes sequences with more tokens.
    return out.at[jnp.where(single, at, q.shape[0])].set(result[:, 0], mode="drop")


def prefill_each(q, reader: PageReader, ragged: RaggedBatch, out: jax.Array) -> jax.Array:
    """Process the sequences with several tokens one after another, in blocks of queries."""
    width = min(reader.blocks.queries, q.shape[0])
    padding = ((0, width), *[(0, 0)] * 3)
    q, out = jnp.pad(q, padding), jnp.pad(out, padding)
    later = None if ragged.ahead is None else jnp.pad(ragged.ahead, (0, width))

    def sequence(i, out):
        start, q_len = ragged.cu_q_lens[i], ragged.q_lens[i]
        row = jax.lax.dynamic_slice_in_dim(reader.table, i, 1, 0)

        def block(x, out):
            offset = x * width + jnp.arange(width)
            valid = offset < q_len
            position = ragged.kv_lens[i] - q_len + offset
            at = start + x * width
            q_x = jax.lax.dynamic_slice_in_dim(q, at, width, 0)
            ahead, reached = None, position
            if later is not None:
                ahead = jax.lax.dynamic_slice_in_dim(later, at, width)
                # Later keys beyond this step are not stored yet.
                ahead = jnp.minimum(ahead, ragged.kv_lens[i] - 1 - position)
                reached, ahead = position + ahead, ahead[None]
            first, _ = reader.blocks_seen(position[0])
            _, last = reader.blocks_seen(jnp.max(jnp.where(valid, reached, 0)))
            queries = (q_x[None], row, position[None], valid[None])
            result = reader.attend(*queries, first, last, ahead)[0]
            # The rows after a short block belong to the next sequence.
            previous_rows = jax.lax.dynamic_slice_in_dim(out, at, width, 0)
            new_rows = jnp.where(valid[:, None, None, None], result, previous_rows)
            return jax.lax.dynamic_update_slice_in_dim(out, new_rows, at, 0)

        blocks = jnp.where(q_len > 1, (q_len + width - 1) // width, 0)
        return jax.lax.fori_loop(0, blocks, block, out)

    return jax.lax.fori_loop(0, ragged.num_seqs, sequence, out)[:-width]


KERNELS = tuple(
    Kernel(name, "pages", "plain XLA, page blocks", paged_attention) for name in PAGED_NAMES
)
