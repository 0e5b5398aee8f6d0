"""Attention over pages on NVIDIA GPUs: one Triton kernel that reads pages and codes in place.

A block of rows belongs to one sequence and one key head. A row is one query of one head, so all
heads of a key head read a key once. A block visits its visible keys with a running softmax
(FlashAttention, Dao et al. 2022), so no loop waits for the processor. If a step has too few blocks
for a GPU, several programs divide the keys of a block, and a second kernel merges their results
(Flash-Decoding, Dao et al. 2023).

Legend: T flat tokens, n sequences, p pages per sequence, P pages, L layers, h heads, g kv heads,
k head dim, d value dim, b blocks of rows, x rows in a block, y keys in a block, c scales of a head,
s splits of the keys, m buckets of distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ed_layers.attention.kernel import Kernel, Paged, reasons
from ed_layers.attention.kernels.paged import PAGED_NAMES, head_axes
from ed_layers.cache.codes import Codes
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.devices import get_mesh, get_triton_precision, ways

#: Default number of rows and of keys of a block, and the smallest that Triton multiplies.
BLOCK, LEAST = 64, 16
#: Maximum number of rows of a block of wide heads: the sums of values must fit into registers.
MOST_WIDE_ROWS, WIDE = 32, 256
#: Maximum head dim: blocks of wider heads do not fit in the fast memory of a multiprocessor.
MOST_DIM = 576
#: Number of blocks that occupy a GPU, two for each of 132 multiprocessors, and the maximum number
#: of parts of the keys of a block.
ENOUGH_BLOCKS, MOST_SPLITS = 264, 32
LOG2_E = math.log2(math.e)


def _refusals(call: Paged) -> list[str]:
    """Return the reasons why the kernel does not support a call, besides `lacks`."""
    blocks = (call.settings.block_q or BLOCK, call.settings.block_k or BLOCK)
    odd = any(block < LEAST or block & (block - 1) for block in blocks)
    width = max(call.q.shape[-1], call.value_dim)
    return reasons(
        {
            f"a head dim of {width}": width > MOST_DIM,
            f"blocks of {blocks} tokens (powers of two from {LEAST})": odd,
        }
    )


@dataclass(frozen=True)
class BlockShape:
    """Sizes and settings of the kernel, known when it is traced.

    Attributes:
        rows, keys: x and y.
        queries, heads: queries and heads of a block; further rows are not in use.
        repeat: h / g.
        splits: s.
        page_size: tokens of a page.
        dim, value_dim: k and d.
        scale, soft_cap: of the scores.
        alibi: factor and dtype of the rounding of a bias by distance; see `Alibi`.
        precision: of products.
    """

    rows: int
    keys: int
    queries: int
    heads: int
    repeat: int
    splits: int
    page_size: int
    dim: int
    value_dim: int
    scale: float
    soft_cap: float | None
    alibi: tuple[float, str | None] | None
    precision: jax.lax.DotAlgorithmPreset | None

    @classmethod
    def of(cls, call: Paged, devices: int, *, interpret: bool) -> BlockShape:
        """Return the shape for a call.

        Args:
            devices: number of devices that share the heads.
            interpret: see `attend_pages`.
        """
        tokens, heads, dim = call.q.shape
        page_size, groups = call.pages.pool.shape[-4:-2]
        repeat, width = heads // groups, max(dim, call.value_dim)
        least = max(LEAST, _round_to_power(repeat))
        rows = min(least, BLOCK) if call.ragged.decode_only else call.settings.block_q or BLOCK
        keys = BLOCK if width <= WIDE // 2 else BLOCK // 2
        keys = keys if call.q.dtype.itemsize <= 2 else max(LEAST, keys // 2)
        if width > WIDE:
            rows = min(rows, MOST_WIDE_ROWS)
        keys = call.settings.block_k or keys
        shared = min(repeat, rows)
        queries = 1 if call.ragged.decode_only else rows // shared
        programs = groups // devices * -(-repeat // shared) * max(1, tokens // queries)
        longest = call.ragged.page_table[call.pages.group].shape[1] * page_size
        splits = min(MOST_SPLITS, ENOUGH_BLOCKS // programs, longest // (4 * keys))
        alibi = call.scoring.alibi
        return cls(
            rows,
            keys,
            queries,
            shared,
            repeat,
            1 << max(0, splits.bit_length() - 1),
            page_size,
            dim,
            call.value_dim,
            call.scoring.scale,
            call.scoring.soft_cap,
            None if alibi is None else (alibi.factor, alibi.dtype),
            None if interpret else get_triton_precision(call.q.dtype),
        )

    @property
    def head_blocks(self) -> int:
        """Number of blocks that divide the heads of a key head."""
        return -(-self.repeat // self.heads)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First column and size of each part of a key."""
        return split_width(self.dim)

    @property
    def value_parts(self) -> list[tuple[int, int]]:
        """First column and size of each part of a value."""
        return split_width(self.value_dim)


def _round_to_power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def add_sink(
    sink: jax.Array, top: jax.Array, total: jax.Array, accs: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Return the state of the softmax of rows with the logit of a sink, which has no value.

    Args:
        sink: logit of each row, or of all rows.
        top: highest score of each row, times `LOG2_E`.
        total: sum of the weights of each row, relative to `top`.
        accs: sums of the weighted values by column part, [rows, columns].
    """
    scaled_sink = sink * LOG2_E
    highest = jnp.maximum(top, scaled_sink)
    anchor = jnp.where(highest == -jnp.inf, 0, highest)
    decay = jnp.exp2(top - anchor)
    total = total * decay + jnp.exp2(scaled_sink - anchor)
    return highest, total, [acc * decay[:, None] for acc in accs]


def split_width(width: int) -> list[tuple[int, int]]:
    """Return the first column and the size of each part of a row: powers of two, as in Triton.

    One part holds all columns, or two parts hold fewer unused columns.
    """
    if width <= LEAST:
        return [(0, LEAST)]
    first = 1 << (width.bit_length() - 1)
    if first == width:
        return [(0, width)]
    second = max(LEAST, _round_to_power(width - first))
    return [(0, 2 * first)] if second == first else [(0, first), (first, second)]


def attend_pages(call: Paged, *, interpret: bool = False) -> Float[Array, "T h d"]:
    """Run the kernel on the heads of each device; padding gets zeros.

    Args:
        interpret: compute the kernel in plain XLA, for tests without a GPU.
    """
    pages, ragged, scoring = call.pages, call.ragged, call.scoring
    mesh, heads = get_mesh(call.config), head_axes(call)
    devices = 1 if mesh is None else ways(mesh, heads)
    shape = BlockShape.of(call, devices, interpret=interpret)
    limits = [0 if x is None else x for x in (scoring.window, scoring.chunk)]
    # The axes of the pool behind its layers: pages, slots, kv heads, keys and values, numbers.
    pool = pages.pool if pages.at else jax.tree.map(lambda array: array[None], pages.pool)
    arrays = {
        "blocks": build_query_blocks(ragged, call.q.shape[0], shape.queries),
        "table": ragged.page_table[pages.group].astype(jnp.int32),
        "numbers": jnp.stack([jnp.asarray(x, jnp.int32) for x in (*limits, *(pages.at or (0,)))]),
        "q": call.q,
        "pool": pool.values if isinstance(pool, Codes) else pool,
    }
    optional = {
        "scales": pool.scale if isinstance(pool, Codes) else None,
        "ahead": ragged.ahead,
        "sinks": None if scoring.sinks is None else scoring.sinks.astype(jnp.float32),
        "slopes": None if scoring.alibi is None else jnp.asarray(scoring.alibi.slopes, "float32"),
        "distances": None if scoring.relative is None else scoring.relative.by_distance(),
    }
    arrays |= {name: array for name, array in optional.items() if array is not None}
    kernel = partial(run_kernels, shape, interpret)
    if mesh is not None and heads is not None:
        head_specs = {"q": P(None, heads), "pool": P(*[None] * 3, heads)}
        head_specs["scales"] = P(None, None, heads)
        head_specs |= dict.fromkeys(("sinks", "slopes", "distances"), P(heads))
        specs = ({name: head_specs.get(name, P()) for name in arrays},)
        kernel = jax.shard_map(
            kernel, mesh=mesh, in_specs=specs, out_specs=P(None, heads), check_vma=False
        )
    return kernel(arrays)


def build_query_blocks(ragged: RaggedBatch, tokens: int, size: int) -> Int[Array, "b 5"]:
    """Return the blocks of queries of a step: the first flat token, the number of tokens, the
    position of the first token, the sequence, and the length of the sequence.

    The padding at the end of the step is divided into blocks of a sequence without keys, so the
    kernel writes zeros there. Unused blocks have no tokens.
    """
    seqs = ragged.kv_lens.shape[0]
    if ragged.decode_only:  # a token is a block
        real, number = ragged.real(), jnp.arange(tokens)
        seq = jnp.clip(ragged.seq_of_token, 0, seqs - 1)
        length = jnp.where(real, ragged.kv_lens[seq], 0)
        columns = (number, jnp.ones_like(number), length - 1, seq, length)
        return jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)
    is_used = jnp.arange(seqs) < ragged.num_seqs
    end = ragged.cu_q_lens[-1:]
    starts = jnp.concatenate([ragged.cu_q_lens[:-1], end])
    q_lens = jnp.concatenate([jnp.where(is_used, ragged.q_lens, 0), tokens - end])
    kv_lens = jnp.concatenate([ragged.kv_lens, jnp.zeros_like(end)])
    counts = -(-q_lens // size)
    ends = jnp.cumsum(counts)
    number = jnp.arange(tokens // size + seqs + 1)
    # A search by halves is a loop with several launches in each iteration.
    seq = jnp.searchsorted(ends, number, side="right", method="compare_all")
    seq = jnp.minimum(seq, seqs)
    first = (number - (ends - counts)[seq]) * size
    count = jnp.where(number < ends[-1], jnp.clip(q_lens[seq] - first, 0, size), 0)
    place = kv_lens[seq] - q_lens[seq] + first
    columns = (starts[seq] + first, count, place, jnp.minimum(seq, seqs - 1), kv_lens[seq])
    return jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)


def run_kernels(
    shape: BlockShape, interpret: bool, arrays: dict[str, jax.Array]
) -> Float[Array, "T h d"]:
    """Run the kernel once for each block of queries, block of heads and split of this device."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, heads, _ = arrays["q"].shape
    dtype, is_split = arrays["q"].dtype, shape.splits > 1

    def paged_attention(*refs: jax.Ref) -> None:
        *inputs, out = refs[: len(arrays) + 1]
        by_name = dict(zip(arrays, inputs, strict=True))
        sums = refs[-1] if is_split else None
        attend_block(shape, *map(pl.program_id, range(3)), out=out, sums=sums, **by_name)

    def merged_attention(parts: jax.Ref, sums: jax.Ref, out: jax.Ref) -> None:
        merge_splits(shape, pl.program_id(0), pl.program_id(1), parts, sums, out)

    def run(
        kernel: Callable[..., None],
        grid: tuple[int, ...],
        out_shape: Sequence[jax.ShapeDtypeStruct],
        warps: int,
        *inputs: jax.Array,
    ) -> Sequence[jax.Array]:
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=tuple(out_shape),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
            interpret=interpret,
            name=kernel.__name__,
        )(*inputs)

    result = jax.ShapeDtypeStruct((tokens, heads, shape.value_dim), dtype)
    head_blocks = heads // shape.repeat * shape.head_blocks
    grid = (arrays["blocks"].shape[0], head_blocks, shape.splits)
    warps = 8 if max(shape.dim, shape.value_dim) > WIDE // 2 and shape.rows > LEAST else 4
    if not is_split:
        return run(paged_attention, grid, [result], warps, *arrays.values())[0]
    parts = jax.ShapeDtypeStruct((shape.splits, *result.shape), jnp.float32)
    sums = jax.ShapeDtypeStruct((shape.splits, tokens, heads), jnp.float32)
    out = run(paged_attention, grid, [parts, sums], warps, *arrays.values())
    return run(merged_attention, (tokens, heads), [result], 4, *out)[0]


def attend_block(
    shape: BlockShape,
    block: jax.Array,
    head_block: jax.Array,
    split: jax.Array,
    *,
    blocks: jax.Ref,
    table: jax.Ref,
    numbers: jax.Ref,
    q: jax.Ref,
    pool: jax.Ref,
    out: jax.Ref,
    sums: jax.Ref | None,
    scales: jax.Ref | None = None,
    ahead: jax.Ref | None = None,
    sinks: jax.Ref | None = None,
    slopes: jax.Ref | None = None,
    distances: jax.Ref | None = None,
) -> None:
    """Compute one block of rows and one split of its keys; the other arguments refer to arrays.

    Scores are multiplied by log2(e), because the exponential of a GPU has the base 2.

    Args:
        shape: sizes and settings.
        block, head_block, split: numbers of the program.
        out: [T, h, d]; [s, T, h, d] with splits.
        sums: logarithms of the sums of the weights, base 2, [s, T, h]; None without splits.
    """
    from jax.experimental.pallas import triton

    start, count, place, seq, length = (blocks[block, i] for i in range(5))
    window, chunk, layer = (numbers[i] for i in range(3))
    size = jnp.maximum(chunk, 1)
    group = jax.lax.div(head_block, shape.head_blocks)
    row = jnp.arange(shape.rows)
    # Without the signs of Python's // and %.
    query = jax.lax.div(row, shape.heads)
    head = jax.lax.rem(head_block, shape.head_blocks) * shape.heads + jax.lax.rem(row, shape.heads)
    real = (query < count) & (query < shape.queries) & (head < shape.repeat)
    head, token, position = group * shape.repeat + head, start + query, place + query
    dot = partial(triton.dot, precision=shape.precision)

    def load(
        array: jax.Ref, rows: jax.Array, at: Any, part: tuple[int, int], width: int
    ) -> jax.Array:
        """Return [rows, columns]; zeros where a row or a column is not in use."""
        columns = part[0] + jnp.arange(part[1])
        mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], part[1]))
        if sum(part) > width:
            mask &= (columns < width)[None]
        numbers = array.at[(*at, columns[None])]
        if array.dtype.itemsize == 1 and jnp.issubdtype(array.dtype, jnp.floating):
            # Triton has no zero of 8 bits.
            return jnp.where(mask, triton.load(numbers, mask=mask).astype(jnp.float32), 0)
        return triton.load(numbers, mask=mask, other=0)

    at_query = (token[:, None], head[:, None])
    queries = [load(q, real, at_query, part, shape.dim) for part in shape.parts]
    last = position
    if ahead is not None:
        # Later keys beyond this step are not stored yet.
        later = triton.load(ahead.at[token], mask=real, other=0)
        last = jnp.minimum(position + later, length - 1)
    # Keys from `low` up to `high` are visible to a query of the block.
    low = jnp.where(window > 0, jnp.maximum(place - window + 1, 0), 0)
    low = jnp.where(chunk > 0, jnp.maximum(low, jax.lax.div(place, size) * size), low)
    high = jnp.where(length > 0, jnp.max(jnp.where(real, last, -1)) + 1, 0)
    slope = None if slopes is None else triton.load(slopes.at[head], mask=real, other=0)

    def add_distances(scores: jax.Array, keys: jax.Array) -> jax.Array:
        """Add the biases by distance."""
        if slope is not None and shape.alibi is not None:
            factor, rounding = shape.alibi
            bias = slope[:, None] * (keys[None] - position[:, None]).astype(jnp.float32)
            if rounding is not None:
                places = slope[:, None] * keys[None].astype(jnp.float32)
                bias += places.astype(rounding).astype(jnp.float32) - places
            scores += bias * factor
        if distances is not None:
            farthest = distances.shape[1] // 2
            ahead_of_query = jnp.clip(keys[None] - position[:, None], -farthest, farthest)
            at = distances.at[head[:, None], ahead_of_query + farthest]
            mask = jnp.broadcast_to(real[:, None], scores.shape)
            scores += triton.load(at, mask=mask, other=0)
        return scores

    def read(stored: jax.Array, page: jax.Array, slot: jax.Array, way: int) -> list[jax.Array]:
        """Return the parts of the keys (way 0) or of the values of a block, decoded."""
        parts, width = (shape.value_parts, shape.value_dim) if way else (shape.parts, shape.dim)
        at = (layer, page[:, None], slot[:, None], group, way)
        values = [load(pool, stored, at, part, width) for part in parts]
        if scales is None:
            return [x.astype(q.dtype) for x in values]
        count, stored_width = scales.shape[4], pool.shape[5]
        decoded = []
        for (first, columns), x in zip(parts, values, strict=True):
            x = x.astype(jnp.float32)
            if count > 1:
                scale_index = jax.lax.div(first + jnp.arange(columns), stored_width // count)
                scale_index = jnp.minimum(scale_index, count - 1)[None]
                at = (layer, page[:, None], group, way, scale_index, slot[:, None])
                mask = jnp.broadcast_to(stored[:, None], x.shape)
                x *= triton.load(scales.at[at], mask=mask, other=0)
            decoded.append(x.astype(q.dtype))  # codes of 8 bits are exact in bfloat16
        return decoded

    def read_scale(stored: jax.Array, page: jax.Array, slot: jax.Array, way: int) -> jax.Array:
        """Return the scales of the keys or values of a block with one scale for each."""
        assert scales is not None
        return triton.load(scales.at[layer, page, group, way, 0, slot], mask=stored, other=0)

    is_scaled = scales is not None and scales.shape[4] == 1
    values_way = pool.shape[4] - 1  # 0 if values are part of their keys

    def visit(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, *accs = carry
        keys = j * shape.keys + jnp.arange(shape.keys)
        stored = (keys >= low) & (keys < high)
        at_page, slot = jax.lax.div(keys, shape.page_size), jax.lax.rem(keys, shape.page_size)
        page = triton.load(table.at[seq, at_page], mask=stored, other=0)
        k = read(stored, page, slot, 0)
        first, *remaining_products = (
            dot(x, y, trans_b=True) for x, y in zip(queries, k, strict=True)
        )
        scores = sum(remaining_products, first).astype(jnp.float32) * shape.scale
        if is_scaled:
            scores *= read_scale(stored, page, slot, 0)[None]
        if shape.soft_cap is not None:
            scores = shape.soft_cap * jnp.tanh(scores / shape.soft_cap)
        scores = add_distances(scores, keys) * LOG2_E
        distance = position[:, None] - keys[None]
        allowed = real[:, None] & stored[None] & (keys[None] <= last[:, None])
        allowed &= (window <= 0) | (distance < window)
        chunks = jax.lax.div(position, size)[:, None] == jax.lax.div(keys, size)[None]
        allowed &= (chunk <= 0) | chunks
        scores = jnp.where(allowed, scores, -jnp.inf)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        anchor = jnp.where(highest == -jnp.inf, 0, highest)
        weights, decay = jnp.exp2(scores - anchor[:, None]), jnp.exp2(top - anchor)
        total = total * decay + jnp.sum(weights, axis=1)
        if is_scaled:
            weights *= read_scale(stored, page, slot, values_way)[None]
        v = read(stored, page, slot, 1) if values_way else k[: len(shape.value_parts)]
        weights = weights.astype(q.dtype)
        products = (dot(weights, x).astype(jnp.float32) for x in v)
        accs = [acc * decay[:, None] + y for acc, y in zip(accs, products, strict=True)]
        return (highest, total, *accs)

    empty = (
        jnp.full(shape.rows, -jnp.inf, jnp.float32),
        jnp.zeros(shape.rows, jnp.float32),
        *(jnp.zeros((shape.rows, columns), jnp.float32) for _, columns in shape.value_parts),
    )
    first = jax.lax.div(low, shape.keys)
    end = jnp.where(count > 0, jax.lax.div(high + shape.keys - 1, shape.keys), 0)
    if shape.splits > 1:
        share = jax.lax.div(end - first + shape.splits - 1, shape.splits)
        first = first + split * share
        end = jnp.minimum(end, first + share)
    top, total, *accs = jax.lax.fori_loop(first, end, visit, empty)
    if sinks is not None:
        sink = triton.load(sinks.at[head], mask=real & (split == 0), other=-jnp.inf)
        top, total, accs = add_sink(sink, top, total, accs)
    divisor = jnp.where(total == 0, 1, total)
    to = at_query if sums is None else (split, *at_query)
    for (first_column, columns), acc in zip(shape.value_parts, accs, strict=True):
        column = first_column + jnp.arange(columns)
        mask = real[:, None] & (column < shape.value_dim)[None]
        result = (acc / divisor[:, None]).astype(out.dtype)
        triton.store(out.at[(*to, column[None])], result, mask=mask)
    if sums is not None:
        total = jnp.where(total == 0, -jnp.inf, top + jnp.log2(divisor))
        triton.store(sums.at[split, token, head], total, mask=real)


def merge_splits(
    shape: BlockShape,
    token: jax.Array,
    head: jax.Array,
    parts: jax.Ref,
    sums: jax.Ref,
    out: jax.Ref,
) -> None:
    """Merge the results of all splits for one token and one head.

    Args:
        shape: sizes and settings.
        token, head: numbers of the program.
        parts: normalized results, [s, T, h, d].
        sums: logarithms of the sums of the weights, base 2, [s, T, h].
        out: [T, h, d].
    """
    from jax.experimental.pallas import triton

    split = jnp.arange(shape.splits)
    total = triton.load(sums.at[split, token, head])
    top = jnp.max(total)
    weights = jnp.exp2(total - jnp.where(top == -jnp.inf, 0, top))
    divisor = jnp.sum(weights)
    weights /= jnp.where(divisor == 0, 1, divisor)
    for first, columns in shape.value_parts:
        column = first + jnp.arange(columns)
        mask = (column < shape.value_dim)[None]
        at = (split[:, None], token, head, column[None])
        values = triton.load(
            parts.at[at], mask=jnp.broadcast_to(mask, (shape.splits, columns)), other=0
        )
        result = jnp.sum(values * weights[:, None], axis=0).astype(out.dtype)
        triton.store(out.at[token, head, column], result, mask=column < shape.value_dim)


KERNELS = tuple(
    Kernel(
        name,
        "pages",
        "pages in place (Triton)",
        attend_pages,
        platform="gpu",
        language="triton",
        refuses=_refusals,
    )
    for name in PAGED_NAMES
)
