"""Attention of packed rows on NVIDIA GPUs: Triton kernels forward and backward, without a mask.

A query attends to the keys of its segment whose order index is between two limits. The limits of
each query contain the order, the window, the chunk and later keys, so the kernels compare three
numbers for a pair, and memory is linear in the length. A block visits only the range of blocks
with visible pairs. Forward is a running softmax; backward recomputes the scores from the logarithm
of the sum of the weights (FlashAttention-2, Dao 2023). One kernel has the gradients of a block of
queries, another those of a block of keys, so no sum needs an atomic addition.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values, i blocks of queries, j blocks of keys, x, y their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int, PyTree

from ed_layers.attention.kernel import FULL_SCORES_LIMIT, Kernel, Projected, reasons
from ed_layers.attention.kernels.paged_gpu import LEAST, LOG2_E, WIDE, add_sink, split_width
from ed_layers.attention.kernels.visibility import BIG, visible
from ed_layers.attention.scoring import Scoring
from ed_layers.devices import get_triton_precision, over_devices

#: Queries and keys of a block, forward and backward, of heads up to half of `WIDE`, in 16 bits.
FORWARD, BACKWARD = (128, 64), (64, 64)
_LACKS = frozenset({"bias", "alibi", "relative", "dropout"})
_DTYPES = ("bfloat16", "float16", "float32")


def list_refusals(call: Projected) -> list[str]:
    """Return the reasons why the kernels do not support a call, besides `_LACKS`."""
    width, dtype = max(call.q.shape[-1], call.v.shape[-1]), call.q.dtype
    blocks = (call.settings.block_q or LEAST, call.settings.block_k or LEAST)
    odd = any(block < LEAST or block & (block - 1) for block in blocks)
    return reasons(
        {
            f"a head dim of {width} (it has up to {WIDE})": width > WIDE,
            f"{dtype} (it has {', '.join(_DTYPES)})": dtype.name not in _DTYPES,
            f"blocks of {blocks} tokens (powers of two from {LEAST})": odd,
        }
    )


def refusals_of_packed(call: Projected) -> list[str]:
    """Return the reasons of `list_refusals`, and a configuration that selects other gradients."""
    config = call.config
    by_xla = config is not None and config.flash_attention_backward_pass_impl == "xla"
    return list_refusals(call) + reasons({"gradients of XLA": by_xla})


@dataclass(frozen=True)
class RowShape:
    """Sizes and settings of the kernels, known when they are traced.

    Attributes:
        forward, backward: x and y.
        repeat: h / g.
        dim, value_dim: k and d.
        scale, soft_cap: of the scores.
        precision: of products.
        interpret: compute the kernels in plain XLA, for tests without a GPU.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    repeat: int
    dim: int
    value_dim: int
    scale: float
    soft_cap: float | None
    precision: jax.lax.DotAlgorithmPreset | None
    interpret: bool

    @classmethod
    def of(cls, call: Projected, q: jax.Array, k: jax.Array, *, interpret: bool) -> RowShape:
        """Return the shape for the queries and keys of one device."""
        dim, value_dim = q.shape[-1], call.v.shape[-1]
        is_wide = max(dim, value_dim) > WIDE // 2
        halves = is_wide + (q.dtype.itemsize > 2)

        def choose_sizes(default: tuple[int, int]) -> tuple[int, int]:
            block_q, block_k = (max(LEAST, size >> halves) for size in default)
            return call.settings.block_q or block_q, call.settings.block_k or block_k

        return cls(
            choose_sizes(FORWARD),
            choose_sizes(BACKWARD),
            q.shape[2] // k.shape[2],
            dim,
            value_dim,
            call.scoring.scale,
            call.scoring.soft_cap,
            None if interpret else get_triton_precision(q.dtype),
            interpret,
        )

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 8 if max(self.dim, self.value_dim) > LEAST * 4 else 4

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        """Return a product in float32."""
        from jax.experimental.pallas import triton

        return triton.dot(a, b, trans_b=trans_b, precision=self.precision).astype(jnp.float32)

    def dot_parts(self, a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
        """Return the product of rows with rows, whose columns are in parts."""
        first, *further = (self.dot(x, y, trans_b=True) for x, y in zip(a, b, strict=True))
        return sum(further, first)

    def score(self, products: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """Return the scores times log2(e), for a GPU's exponential, and the slope of the cap."""
        scores = products * self.scale
        if self.soft_cap is None:
            return scores * LOG2_E, 1.0
        squashed = jnp.tanh(scores / self.soft_cap)
        return squashed * (self.soft_cap * LOG2_E), 1 - squashed * squashed


def attend_packed(call: Projected, *, interpret: bool = False) -> Float[Array, "b s h d"]:
    """Run the kernels on the rows and heads of each device.

    Args:
        call: the call.
        interpret: compute the kernels in plain XLA, for tests without a GPU.
    """
    sinks = call.scoring.sinks

    def run_on_device(q, k, v, limits, sinks):
        shape = RowShape.of(call, q, k, interpret=interpret)
        return cast(jax.Array, attention_of_rows(shape, q, k, v, sinks, limits))

    limits = limit_keys(call.mask_info, call.scoring)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    return over_devices(run_on_device, call.config, call.q, call.k, call.v, limits, sinks)


def limit_keys(mask_info: MaskInfo, scoring: Scoring) -> dict[str, Int[Array, "b n l"]]:
    """Return the numbers that decide which keys a query attends to.

    "queries": segment (-1 = padding), first and last visible order index. "keys": segment and order
    index.
    """
    index, segments = mask_info.q_index, mask_info.q_segment_ids
    first, last = visible(index, index, scoring.window, scoring.chunk, causal=False)
    if mask_info.causal:
        _, last = visible(index, index, None, scoring.chunk, causal=False)
        last = jnp.minimum(last, mask_info.last_index)
    queries = (jnp.where(segments == 0, -1, segments), first, last)
    keys = (mask_info.kv_segment_ids, mask_info.kv_index)
    return {
        name: jnp.stack(jnp.broadcast_arrays(*(x.astype(jnp.int32) for x in rows)), axis=1)
        for name, rows in (("queries", queries), ("keys", keys))
    }


def find_ranges(
    limits: dict[str, jax.Array], block_q: int, block_k: int
) -> tuple[Int[Array, "b i 2"], Int[Array, "b j 2"]]:
    """Return the visible key blocks of each query block, and the queries that see a key block: the
    first block, and the one after the last. No required block is omitted."""

    def bounds(x: jax.Array, real: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Return the smallest and the largest number of each block, without padding."""
        more, blocks = ((0, 0), (0, -x.shape[1] % size)), (x.shape[0], -1, size)
        low = jnp.pad(jnp.where(real, x, BIG // 2), more, constant_values=BIG // 2)
        high = jnp.pad(jnp.where(real, x, -1), more, constant_values=-1)
        return jnp.min(low.reshape(blocks), axis=2), jnp.max(high.reshape(blocks), axis=2)

    (q_segments, first, last), (k_segments, index) = (
        jnp.moveaxis(jnp.minimum(limits[name], BIG // 2), 1, 0) for name in ("queries", "keys")
    )
    q_real, k_real = q_segments >= 0, k_segments != 0
    q_from, q_to = (x[:, :, None] for x in bounds(q_segments, q_real, block_q))
    q_low, q_high = bounds(first, q_real, block_q)[0], bounds(last, q_real, block_q)[1]
    k_from, k_to = (x[:, None] for x in bounds(k_segments, k_real, block_k))
    k_low, k_high = (x[:, None] for x in bounds(index, k_real, block_k))
    seen = (q_from <= k_to) & (k_from <= q_to)
    seen &= (k_low <= q_high[:, :, None]) & (q_low[:, :, None] <= k_high)

    def span(seen: jax.Array) -> jax.Array:
        number = jnp.arange(seen.shape[2])
        start = jnp.min(jnp.where(seen, number, seen.shape[2]), axis=2)
        return jnp.stack([start, jnp.max(jnp.where(seen, number + 1, 0), axis=2)], axis=2)

    return span(seen).astype(jnp.int32), span(seen.swapaxes(1, 2)).astype(jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_of_rows(
    shape: RowShape,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    sinks: Float[Array, " h"] | None,
    limits: dict[str, jax.Array],
) -> Float[Array, "b s h d"]:
    """Return attention of the rows of one device; zeros for a query without visible keys.

    Args:
        shape: sizes and settings.
        sinks: one logit per head, or None.
        limits: see `limit_keys`.
    """
    return run_forward(shape, q, k, v, sinks, limits)[0]


def run_forward(
    shape: RowShape,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    limits: dict[str, jax.Array],
) -> tuple[Float[Array, "b s h d"], Float[Array, "b h s"]]:
    """Return the result, and the logarithms of the sums of the weights, base 2."""
    b, s, heads, _ = q.shape
    ranges, _ = find_ranges(limits, *shape.forward)
    arrays = {"q": q, "k": k, "v": v, **limits, "ranges": ranges}
    if sinks is not None:
        arrays["sinks"] = sinks
    results = {
        "out": jax.ShapeDtypeStruct((b, s, heads, shape.value_dim), q.dtype),
        "sums": jax.ShapeDtypeStruct((b, heads, s), jnp.float32),
    }
    grid = (-(-s // shape.forward[0]), heads, b)
    out, sums = run_kernel(shape, packed_attention, grid, arrays, results)
    return out, sums


def save_forward(
    shape: RowShape,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    limits: dict[str, jax.Array],
) -> tuple[jax.Array, tuple[PyTree, ...]]:
    """Return the result, and the arrays of the backward pass."""
    out, sums = run_forward(shape, q, k, v, sinks, limits)
    return out, (q, k, v, sinks, limits, out, sums)


def run_backward(
    shape: RowShape, saved: tuple[PyTree, ...], d_out: Float[Array, "b s h d"]
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of q, k, v and the sinks."""
    q, k, v, sinks, limits, out, sums = saved
    (b, s, heads, _), (t, groups) = q.shape, k.shape[1:3]
    key_ranges, query_ranges = find_ranges(limits, *shape.backward)
    real = (limits["queries"][:, 0] >= 0)[:, :, None]
    d_out = d_out.astype(q.dtype)
    # The part of the gradient of a score that all keys of a query share, [b, h, s].
    products = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    shared = jnp.where(real, products, 0).swapaxes(1, 2)
    arrays = {"q": q, "k": k, "v": v, **limits, "d_out": d_out, "sums": sums, "shared": shared}
    block_q, block_k = shape.backward
    (d_q,) = run_kernel(
        shape,
        packed_attention_queries,
        (-(-s // block_q), heads, b),
        {**arrays, "ranges": key_ranges},
        {"d_q": jax.ShapeDtypeStruct(q.shape, q.dtype)},
    )
    d_k, d_v = run_kernel(
        shape,
        packed_attention_keys,
        (-(-t // block_k), groups, b),
        {**arrays, "ranges": query_ranges},
        {
            "d_k": jax.ShapeDtypeStruct(k.shape, k.dtype),
            "d_v": jax.ShapeDtypeStruct(v.shape, v.dtype),
        },
    )
    d_sinks = None
    if sinks is not None:
        weights = jnp.exp2(sinks[:, None] * LOG2_E - sums)
        d_sinks = -jnp.sum(jnp.where(shared == 0, 0, weights * shared), axis=(0, 2))
    return d_q, d_k, d_v, d_sinks, None


attention_of_rows.defvjp(save_forward, run_backward)


def run_kernel(
    shape: RowShape,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    arrays: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """Run a kernel of this file with the arrays and results as named arguments."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def call_kernel(*refs: jax.Ref) -> None:
        by_name = dict(zip((*arrays, *results), refs, strict=True))
        kernel(shape, *map(pl.program_id, range(3)), **by_name)

    return pl.pallas_call(
        call_kernel,
        grid=grid,
        out_shape=tuple(results.values()),
        compiler_params=triton.CompilerParams(num_warps=shape.warps, num_stages=2),
        interpret=shape.interpret,
        name=kernel.__name__,
    )(*arrays.values())


@dataclass(frozen=True)
class RowBlock:
    """A block of queries or keys of one head in a kernel.

    Attributes:
        row, head: numbers of the row and of the head.
        place: places in the row, [n].
        inside: which places exist.
        numbers: the numbers of `limit_keys`, each [n].
    """

    row: jax.Array
    head: jax.Array
    place: jax.Array
    inside: jax.Array
    numbers: tuple[jax.Array, ...]

    @classmethod
    def load(
        cls,
        limits: jax.Ref,
        row: jax.Array,
        head: jax.Array,
        number: jax.Array,
        size: int,
        pad: int,
    ) -> RowBlock:
        """Load a block.

        Args:
            limits: numbers of all rows, [b, n, l].
            row, head, number: numbers of the row, the head and the block.
            size: places of the block.
            pad: segment of a place outside the row.
        """
        from jax.experimental.pallas import triton

        place = number * size + jnp.arange(size)
        inside = place < limits.shape[2]
        loaded = tuple(
            triton.load(limits.at[row, n, place], mask=inside, other=pad if n == 0 else 0)
            for n in range(limits.shape[1])
        )
        return cls(row, head, place, inside, loaded)

    def at_head(self, head: jax.Array) -> RowBlock:
        """Return the same places of another head."""
        return replace(self, head=head)

    def read(self, array: jax.Ref, width: int, real: jax.Array | None = None) -> list[jax.Array]:
        """Return the rows of [b, n, heads, width] in parts; zeros where nothing is stored."""
        from jax.experimental.pallas import triton

        parts = []
        mask = self.inside if real is None else real
        for first, count in split_width(width):
            columns = first + jnp.arange(count)
            at = array.at[self.row, self.place[:, None], self.head, columns[None]]
            stored = mask[:, None] & (columns < width)[None]
            parts.append(triton.load(at, mask=stored, other=0))
        return parts

    def read_numbers(self, array: jax.Ref) -> jax.Array:
        """Return the numbers of [b, heads, n]."""
        from jax.experimental.pallas import triton

        return triton.load(array.at[self.row, self.head, self.place], mask=self.inside, other=0)

    def write(self, array: jax.Ref, parts: Sequence[jax.Array], width: int) -> None:
        """Store parts of rows to [b, n, heads, width]."""
        from jax.experimental.pallas import triton

        for (first, count), part in zip(split_width(width), parts, strict=True):
            columns = first + jnp.arange(count)
            at = array.at[self.row, self.place[:, None], self.head, columns[None]]
            stored = self.inside[:, None] & (columns < width)[None]
            triton.store(at, part.astype(array.dtype), mask=stored)


def is_visible(queries: RowBlock, keys: RowBlock, *, keys_first: bool = False) -> jax.Array:
    """Return which keys the queries attend to, [x, y], or [y, x] with `keys_first`."""
    q_at, k_at = (None, slice(None)), (slice(None), None)
    q_at, k_at = (q_at, k_at) if keys_first else (k_at, q_at)
    segment, first, last = (x[q_at] for x in queries.numbers)
    k_segment, index = (x[k_at] for x in keys.numbers)
    return (segment == k_segment) & (first <= index) & (index <= last)


def packed_attention(
    shape: RowShape,
    block: jax.Array,
    head: jax.Array,
    row: jax.Array,
    *,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    queries: jax.Ref,
    keys: jax.Ref,
    ranges: jax.Ref,
    out: jax.Ref,
    sums: jax.Ref,
    sinks: jax.Ref | None = None,
) -> None:
    """Compute a block of queries of one head.

    Args:
        shape: sizes and settings.
        block, head, row: numbers of the program.
        ranges: of key blocks, [b, i, 2].
        out: [b, s, h, d].
        sums: [b, h, s].
    """
    from jax.experimental.pallas import triton

    (block_q, block_k), group = shape.forward, jax.lax.div(head, shape.repeat)
    ours = RowBlock.load(queries, row, head, block, block_q, -1)
    q_parts = ours.read(q, shape.dim)

    def visit(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, *accs = carry
        theirs = RowBlock.load(keys, row, group, j, block_k, 0)
        scores, _ = shape.score(shape.dot_parts(q_parts, theirs.read(k, shape.dim)))
        scores = jnp.where(is_visible(ours, theirs), scores, -jnp.inf)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        anchor = jnp.where(highest == -jnp.inf, 0, highest)
        weights, decay = jnp.exp2(scores - anchor[:, None]), jnp.exp2(top - anchor)
        total = total * decay + jnp.sum(weights, axis=1)
        weights = weights.astype(q.dtype)
        products = (shape.dot(weights, x) for x in theirs.read(v, shape.value_dim))
        accs = [acc * decay[:, None] + y for acc, y in zip(accs, products, strict=True)]
        return (highest, total, *accs)

    empty = (
        jnp.full(block_q, -jnp.inf, jnp.float32),
        jnp.zeros(block_q, jnp.float32),
        *(jnp.zeros((block_q, count), jnp.float32) for _, count in split_width(shape.value_dim)),
    )
    first, end = ranges[row, block, 0], ranges[row, block, 1]
    top, total, *accs = jax.lax.fori_loop(first, end, visit, empty)
    if sinks is not None:
        top, total, accs = add_sink(sinks[head], top, total, accs)
    divisor = jnp.where(total == 0, 1, total)
    ours.write(out, [acc / divisor[:, None] for acc in accs], shape.value_dim)
    lse = jnp.where(total == 0, 0, top + jnp.log2(divisor))
    triton.store(sums.at[row, head, ours.place], lse, mask=ours.inside)


def packed_attention_queries(
    shape: RowShape,
    block: jax.Array,
    head: jax.Array,
    row: jax.Array,
    *,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    queries: jax.Ref,
    keys: jax.Ref,
    d_out: jax.Ref,
    sums: jax.Ref,
    shared: jax.Ref,
    ranges: jax.Ref,
    d_q: jax.Ref,
) -> None:
    """Compute the gradients of a block of queries of one head; see `packed_attention`."""
    (block_q, block_k), group = shape.backward, jax.lax.div(head, shape.repeat)
    ours = RowBlock.load(queries, row, head, block, block_q, -1)
    q_parts = ours.read(q, shape.dim)
    d_parts = ours.read(d_out, shape.value_dim, ours.numbers[0] >= 0)
    lse, share = (ours.read_numbers(x)[:, None] for x in (sums, shared))

    def visit(j: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        theirs = RowBlock.load(keys, row, group, j, block_k, 0)
        k_parts = theirs.read(k, shape.dim)
        scores, slope = shape.score(shape.dot_parts(q_parts, k_parts))
        weights = jnp.exp2(jnp.where(is_visible(ours, theirs), scores - lse, -jnp.inf))
        d_weights = shape.dot_parts(d_parts, theirs.read(v, shape.value_dim))
        d_scores = (weights * (d_weights - share) * slope).astype(q.dtype)
        return tuple(acc + shape.dot(d_scores, x) for acc, x in zip(accs, k_parts, strict=True))

    empty = tuple(jnp.zeros((block_q, count), jnp.float32) for _, count in split_width(shape.dim))
    accs = jax.lax.fori_loop(ranges[row, block, 0], ranges[row, block, 1], visit, empty)
    ours.write(d_q, [acc * shape.scale for acc in accs], shape.dim)


def packed_attention_keys(
    shape: RowShape,
    block: jax.Array,
    group: jax.Array,
    row: jax.Array,
    *,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    queries: jax.Ref,
    keys: jax.Ref,
    d_out: jax.Ref,
    sums: jax.Ref,
    shared: jax.Ref,
    ranges: jax.Ref,
    d_k: jax.Ref,
    d_v: jax.Ref,
) -> None:
    """Compute the gradients of a block of keys and values, over all heads that read them.

    Args:
        shape: sizes and settings.
        block, group, row: numbers of the program.
        ranges: of query blocks, [b, j, 2].
        d_k, d_v: [b, t, g, k] and [b, t, g, d].
    """
    block_q, block_k = shape.backward
    ours = RowBlock.load(keys, row, group, block, block_k, 0)
    k_parts, v_parts = ours.read(k, shape.dim), ours.read(v, shape.value_dim)
    count = len(k_parts)

    def visit(n: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i = ranges[row, block, 0] + jax.lax.div(n, shape.repeat)
        head = group * shape.repeat + jax.lax.rem(n, shape.repeat)
        theirs = RowBlock.load(queries, row, head, i, block_q, -1)
        q_parts = theirs.read(q, shape.dim)
        d_parts = theirs.read(d_out, shape.value_dim, theirs.numbers[0] >= 0)
        lse, share = (theirs.read_numbers(x)[None] for x in (sums, shared))
        scores, slope = shape.score(shape.dot_parts(k_parts, q_parts))
        seen = is_visible(theirs, ours, keys_first=True)
        weights = jnp.exp2(jnp.where(seen, scores - lse, -jnp.inf))
        d_weights = shape.dot_parts(v_parts, d_parts)
        d_scores = (weights * (d_weights - share) * slope).astype(q.dtype)
        weights = weights.astype(q.dtype)
        pairs = [(d_scores, x) for x in q_parts] + [(weights, x) for x in d_parts]
        return tuple(acc + shape.dot(*pair) for acc, pair in zip(accs, pairs, strict=True))

    widths = split_width(shape.dim) + split_width(shape.value_dim)
    empty = tuple(jnp.zeros((block_k, columns), jnp.float32) for _, columns in widths)
    visits = (ranges[row, block, 1] - ranges[row, block, 0]) * shape.repeat
    accs = jax.lax.fori_loop(0, jnp.maximum(visits, 0), visit, empty)
    ours.write(d_k, [acc * shape.scale for acc in accs[:count]], shape.dim)
    ours.write(d_v, accs[count:], shape.value_dim)


KERNELS = tuple(
    Kernel(
        name,
        "projected",
        "packed rows (Triton)",
        attend_packed,
        platform="gpu",
        language="triton",
        lacks=_LACKS,
        refuses=refusals_of_packed,
        auto_from=auto_from,
    )
    for name, auto_from in (("flash_attn2", FULL_SCORES_LIMIT + 1), ("blocksparse", None))
)
