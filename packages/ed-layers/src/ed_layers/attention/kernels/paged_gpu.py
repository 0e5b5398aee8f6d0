"""Attention over pages on NVIDIA GPUs: prompts by a Triton kernel that reads pages in place.

A block of queries belongs to one sequence and one head. It visits the blocks of its visible keys
with a running softmax (FlashAttention, Dao et al. 2022), so no loop waits for the processor. Steps
that only decode use plain XLA.

Legend: T flat tokens, n sequences, p pages per sequence, P pages, h heads, g kv heads, k head dim,
d value dim, b blocks of queries, x queries in a block, y keys in a block, K and D the powers of two
that hold k and d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.attention.kernel import Kernel, Paged, reasons
from ed_layers.attention.kernels.paged import PAGED_NAMES, head_axes, paged_attention
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.devices import get_mesh

#: Default number of queries and of keys of a block, and the smallest that Triton multiplies.
BLOCK, LEAST = 64, 16
#: Maximum head dim: blocks of wider heads do not fit in the fast memory of a multiprocessor.
MOST_DIM = 256


def _refusals(call: Paged) -> list[str]:
    """Return the reasons why the kernel does not support a call, besides `lacks`."""
    if not isinstance(call.pages.pool, jax.Array):
        return ["quantized pages"]
    blocks = (call.settings.block_q or BLOCK, call.settings.block_k or BLOCK)
    odd = any(block < LEAST or block & (block - 1) for block in blocks)
    return reasons(
        {
            f"a head dim of {call.q.shape[-1]}": call.q.shape[-1] > MOST_DIM,
            f"pages in {call.pages.pool.dtype}, queries in {call.q.dtype}": (
                call.pages.pool.dtype != call.q.dtype
            ),
            f"blocks of {blocks} tokens (powers of two from {LEAST})": odd,
        }
    )


@dataclass(frozen=True)
class PromptShape:
    """What is known when the kernel is traced.

    Attributes:
        queries, keys: x and y.
        dim, value_dim: k and d.
        repeat: h / g.
        scale, soft_cap: of the scores.
        precision: of products.
    """

    queries: int
    keys: int
    dim: int
    value_dim: int
    repeat: int
    scale: float
    soft_cap: float | None
    precision: jax.lax.DotAlgorithmPreset | None


def prompt_attention(call: Paged, *, interpret: bool = False) -> Float[Array, "T h d"]:
    """Run the kernel on the heads of each device; padding gets zeros.

    Args:
        interpret: compute the kernel in plain XLA, for tests without a GPU.
    """
    if call.ragged.decode_only:
        return paged_attention(call)
    pages, ragged, scoring = call.pages, call.ragged, call.scoring
    assert isinstance(pages.pool, jax.Array), "refused"
    shape = PromptShape(
        queries=call.settings.block_q or BLOCK,
        keys=call.settings.block_k or (BLOCK if call.q.shape[-1] <= 128 else BLOCK // 2),
        dim=call.q.shape[-1],
        value_dim=call.value_dim,
        repeat=call.q.shape[1] // pages.pool.shape[-3],
        scale=scoring.scale,
        soft_cap=scoring.soft_cap,
        precision=None if interpret else get_precision(call.q.dtype),
    )
    limits = [0 if x is None else x for x in (scoring.window, scoring.chunk)]
    # The axes of the pool behind its layers: pages, slots, kv heads, keys and values, numbers.
    pool = pages.pool if pages.at else pages.pool[None]
    arrays = {
        "blocks": build_query_blocks(ragged, call.q.shape[0], shape.queries),
        "table": ragged.page_table[pages.group].astype(jnp.int32),
        "numbers": jnp.stack([jnp.asarray(x, jnp.int32) for x in (*limits, *(pages.at or (0,)))]),
        "q": call.q,
        "pool": pool,
    }
    if ragged.ahead is not None:
        arrays["ahead"] = ragged.ahead
    if scoring.sinks is not None:
        arrays["sinks"] = scoring.sinks.astype(jnp.float32)
    kernel = partial(run_kernel, shape, pool.shape[2], interpret)
    mesh, heads = get_mesh(call.config), head_axes(call)
    if mesh is not None and heads is not None:
        head_specs = {"q": P(None, heads), "pool": P(*[None] * 3, heads), "sinks": P(heads)}
        specs = ({name: head_specs.get(name, P()) for name in arrays},)
        kernel = jax.shard_map(
            kernel, mesh=mesh, in_specs=specs, out_specs=P(None, heads), check_vma=False
        )
    return jnp.where(ragged.real()[:, None, None], kernel(arrays), 0)


def get_precision(dtype: DTypeLike) -> jax.lax.DotAlgorithmPreset | None:
    """Return the precision of products; None = that of jax's products by default.

    Where jax computes float32 products in float32, three products of tensor cores replace one of
    the slow float32 units; the result is as exact.
    """
    matmul_precision = jax.config.values["jax_default_matmul_precision"]
    exact = matmul_precision in ("highest", "float32")
    if exact and jnp.dtype(dtype) == jnp.float32:
        return jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return None


def build_query_blocks(ragged: RaggedBatch, tokens: int, size: int) -> Int[Array, "b 5"]:
    """Return the blocks of queries of a step: the first flat token, the number of tokens, the
    position of the first token, the sequence, and the length of the sequence. Unused blocks have no
    tokens."""
    seqs = ragged.kv_lens.shape[0]
    counts = jnp.where(jnp.arange(seqs) < ragged.num_seqs, -(-ragged.q_lens // size), 0)
    ends = jnp.cumsum(counts)
    number = jnp.arange(tokens // size + seqs)
    # A search by halves is a loop with several launches in each iteration.
    seq = jnp.searchsorted(ends, number, side="right", method="compare_all")
    seq = jnp.minimum(seq, seqs - 1)
    first = (number - (ends - counts)[seq]) * size
    count = jnp.clip(ragged.q_lens[seq] - first, 0, size)
    count = jnp.where(number < ends[-1], count, 0)
    place = ragged.kv_lens[seq] - ragged.q_lens[seq] + first
    columns = (ragged.cu_q_lens[seq] + first, count, place, seq, ragged.kv_lens[seq])
    return jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)


def run_kernel(
    shape: PromptShape, page_size: int, interpret: bool, arrays: dict[str, jax.Array]
) -> Float[Array, "T h d"]:
    """Run the kernel once for each block of queries and each head of this device."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, heads, _ = arrays["q"].shape

    def kernel(*refs: jax.Ref) -> None:
        by_name = dict(zip((*arrays, "out"), refs, strict=True))
        attend_block(shape, page_size, pl.program_id(0), pl.program_id(1), **by_name)

    wide = shape.dim > 128
    return pl.pallas_call(
        kernel,
        grid=(arrays["blocks"].shape[0], heads),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, shape.value_dim), arrays["q"].dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if wide else 4, num_stages=2),
        interpret=interpret,
        name="prompt_attention",
    )(*arrays.values())


def attend_block(
    shape: PromptShape,
    page_size: int,
    block: jax.Array,
    head: jax.Array,
    *,
    blocks: jax.Ref,
    table: jax.Ref,
    numbers: jax.Ref,
    q: jax.Ref,
    pool: jax.Ref,
    out: jax.Ref,
    ahead: jax.Ref | None = None,
    sinks: jax.Ref | None = None,
) -> None:
    """Compute one block of queries of one head; all other arguments are references to arrays."""
    from jax.experimental.pallas import triton

    start, count, place, seq, length = (blocks[block, i] for i in range(5))
    window, chunk, layer = (numbers[i] for i in range(3))
    size = jnp.maximum(chunk, 1)
    queries = jnp.arange(shape.queries)
    real, position = queries < count, place + queries
    columns, value_columns = (get_columns(x) for x in (shape.dim, shape.value_dim))

    def load(array: jax.Ref, rows: jax.Array, at: Any, cells: jax.Array, width: int) -> jax.Array:
        """Return [rows, cells]; zeros where a row or a column is not in use."""
        mask = rows[:, None] & (cells < width)[None]
        return triton.load(array.at[at], mask=mask, other=0)

    dot = partial(triton.dot, precision=shape.precision)
    tokens = (start + queries)[:, None]
    x = load(q, real, (tokens, head, columns[None]), columns, shape.dim)
    last = position
    if ahead is not None:
        # Later keys beyond this step are not stored yet.
        later = triton.load(ahead.at[start + queries], mask=real, other=0)
        last = jnp.minimum(position + later, length - 1)
    # Keys from `low` up to `high` are visible to a query of the block.
    low = jnp.where(window > 0, jnp.maximum(place - window + 1, 0), 0)
    low = jnp.where(chunk > 0, jnp.maximum(low, jax.lax.div(place, size) * size), low)
    high = jnp.max(jnp.where(real, last, -1)) + 1

    def visit(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        keys = j * shape.keys + jnp.arange(shape.keys)
        stored = (keys >= low) & (keys < high)
        # Without the signs of Python's // and %.
        at_page, slot = jax.lax.div(keys, page_size), jax.lax.rem(keys, page_size)[:, None]
        page = triton.load(table.at[seq, at_page], mask=stored, other=0)
        at = (layer, page[:, None], slot, jax.lax.div(head, shape.repeat))
        k = load(pool, stored, (*at, 0, columns[None]), columns, shape.dim)
        values = pool.shape[-2] - 1  # 0 if values are part of their keys
        v = load(pool, stored, (*at, values, value_columns[None]), value_columns, shape.value_dim)
        scores = dot(x, k, trans_b=True).astype(jnp.float32) * shape.scale
        if shape.soft_cap is not None:
            scores = shape.soft_cap * jnp.tanh(scores / shape.soft_cap)
        distance = position[:, None] - keys[None]
        allowed = real[:, None] & stored[None] & (keys[None] <= last[:, None])
        allowed &= (window <= 0) | (distance < window)
        chunks = jax.lax.div(position, size)[:, None] == jax.lax.div(keys, size)[None]
        allowed &= (chunk <= 0) | chunks
        scores = jnp.where(allowed, scores, -jnp.inf)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        anchor = jnp.where(highest == -jnp.inf, 0, highest)
        weights, decay = _exp(scores - anchor[:, None]), _exp(top - anchor)
        total = total * decay + jnp.sum(weights, axis=1)
        acc = acc * decay[:, None] + dot(weights.astype(v.dtype), v).astype(jnp.float32)
        return highest, total, acc

    empty = (
        jnp.full(shape.queries, -jnp.inf, jnp.float32),
        jnp.zeros(shape.queries, jnp.float32),
        jnp.zeros((shape.queries, len(value_columns)), jnp.float32),
    )
    end = jnp.where(count > 0, jax.lax.div(high + shape.keys - 1, shape.keys), 0)
    top, total, acc = jax.lax.fori_loop(jax.lax.div(low, shape.keys), end, visit, empty)
    if sinks is not None:
        sink = sinks[head]
        highest = jnp.maximum(top, sink)
        anchor = jnp.where(highest == -jnp.inf, 0, highest)
        decay = _exp(top - anchor)
        total, acc = total * decay + _exp(sink - anchor), acc * decay[:, None]
    result = acc / jnp.where(total == 0, 1, total)[:, None]
    mask = real[:, None] & (value_columns < shape.value_dim)[None]
    to = out.at[tokens, head, value_columns[None]]
    triton.store(to, result.astype(out.dtype), mask=mask)


def get_columns(width: int) -> Int[Array, " K"]:
    """Return the indices of columns, whose number is a power of two that Triton multiplies."""
    return jnp.arange(max(LEAST, 1 << (width - 1).bit_length()))


def _exp(x: jax.Array) -> jax.Array:
    """Return e^x by the instruction of a GPU for powers of two."""
    return jnp.exp2(x * math.log2(math.e))


KERNELS = tuple(
    Kernel(
        name,
        "pages",
        "prompts over pages (Triton)",
        prompt_attention,
        platform="gpu",
        language="triton",
        lacks=frozenset({"alibi", "relative"}),
        refuses=_refusals,
    )
    for name in PAGED_NAMES
)
