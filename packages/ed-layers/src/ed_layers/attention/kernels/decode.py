"""`autoregressive_decodeattn`: attention of few queries to a long contiguous cache.

The kernel visits the blocks of slots from the first one that is visible in a window to the last
written one, so the cost does not depend on the capacity. Quantized storage is read as codes. Slots
that are split over devices stay in place, and only softmax sums are exchanged.

Legend: b batch, s queries, h heads, g kv heads, r heads per kv head, t slots, k key dim, d value
dim, x queries in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Cached, Kernel
from ed_layers.attention.kernels.slots import KeyValueSlots, at_least_two_blocks, attention_to_slots
from ed_layers.attention.kernels.softmax import Bound
from ed_layers.attention.kernels.visibility import slots_seen
from ed_layers.attention.scoring import get_head_indices, pad_axis, split_heads
from ed_layers.cache.sharded import first_slot, get_partition_specs
from ed_layers.devices import get_platform

_NAME = "autoregressive_decodeattn"

# Parallel splits of a block on an accelerator; a CPU does not benefit from splits.
SPLITS = 16

#: `(queries [b, g, r, x, k], mask, bias) -> output`.
OfQueries = Callable[[jax.Array, MaskInfo, jax.Array | None], jax.Array]


def decode_attention(call: Cached) -> Float[Array, "b s h d"]:
    """Compute attention to the stored keys of a contiguous cache."""
    q, stored, scoring = call.q, call.stored, call.scoring
    b, s, h, k_dim = q.shape
    groups = stored.keys.shape[-3]
    splits = 1 if get_platform(call.config) == "cpu" else SPLITS
    block_q, block_k = call.settings.blocks(s, stored.keys.shape[-2])
    grouped = q.reshape(b, s, groups, h // groups, k_dim).transpose(0, 2, 3, 1, 4)
    bias = None if scoring.bias is None else split_heads(scoring.bias, groups, h // groups)
    sinks = None if scoring.sinks is None else scoring.sinks.reshape(groups, -1, 1, 1)
    scoring = replace(scoring, bias=None, sinks=None)
    by_sum = stored.layout == "leaves" and (b, s) == (1, 1)

    def local(q, keys, values, info, bias, sinks, heads, limits, at, axes=None) -> jax.Array:
        """Return the output [b, g, r, s, d] for local slots, merged over the devices of `axes`."""
        window, chunk, buckets = limits
        relative = scoring.relative and replace(scoring.relative, table=buckets)
        limited = replace(scoring, window=window, chunk=chunk, relative=relative)
        slots = KeyValueSlots(
            keys, values, at, *at_least_two_blocks(splits, block_k, keys.shape[-2])
        )
        first: Bound = 0
        if axes is not None:
            assert stored.sharding is not None
            first = first_slot(stored.sharding, slots.count)

        def attend_queries(q: jax.Array, info: MaskInfo, bias: jax.Array | None) -> jax.Array:
            bounds: tuple[Bound, Bound] = (0, slots.count)
            if stored.ordered and info.causal:
                bounds = slots_seen(info, window, chunk, slots.count, first)
            part = attention_to_slots(q, slots, info, limited, bias, bounds, heads, by_sum=by_sum)
            if axes is not None:
                part = part.merged_over(axes)
            return (part if sinks is None else part.beside(sinks)).out

        return by_query_blocks(attend_queries, q, info, bias, block_q)

    arguments = (
        *(grouped, stored.keys, stored.values, stored.mask_info, bias, sinks),
        get_head_indices(groups, h // groups),
        (scoring.window, scoring.chunk, scoring.relative and scoring.relative.table),
        stored.at,
    )
    if stored.sharding is None:
        out = local(*arguments)
    else:
        out = where_slots_lie(local, arguments, stored.sharding)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, s, h, -1).astype(q.dtype)


def by_query_blocks(
    attend_queries: OfQueries, q: jax.Array, info: MaskInfo, bias: jax.Array | None, size: int
) -> jax.Array:
    """Process a prompt in blocks of queries, each of which visits only its visible slots."""
    s = q.shape[3]
    if s <= size:
        return attend_queries(q, info, bias)
    count = -(-s // size)

    def split_blocks(x: jax.Array, axis: int) -> jax.Array:
        x = pad_axis(x, axis, -s % size)
        shape = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def block(parts: tuple[jax.Array, dict[str, jax.Array | None], jax.Array | None]) -> jax.Array:
        q_x, rows, bias_x = parts
        return attend_queries(q_x, replace(info, **rows), bias_x)

    rows = {"q_segment_ids": info.q_segment_ids, "q_index": info.q_index, "ahead": info.ahead}
    cut_rows = {name: None if x is None else split_blocks(x, 1) for name, x in rows.items()}
    out = jax.lax.map(
        block, (split_blocks(q, 3), cut_rows, None if bias is None else split_blocks(bias, 3))
    )
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :s]


def where_slots_lie(
    local: Callable[..., jax.Array], arguments: tuple[Any, ...], sharding: NamedSharding
) -> jax.Array:
    """Run `local` on the rows, heads and slots of each device."""
    q, keys, values, info, bias, sinks, numbers, limits, at = arguments
    rows, heads, axes = sharding.spec[:3]
    lead = len(at)
    row_spec, slot_spec = P(rows), P(rows, axes)
    info_specs = replace(
        info,
        q_segment_ids=row_spec,
        kv_segment_ids=slot_spec,
        q_index=row_spec,
        kv_index=slot_spec,
        ahead=None if info.ahead is None else row_spec,
    )
    bias_spec = None
    if bias is not None:
        row, head = (
            axis if size > 1 else None
            for axis, size in zip((rows, heads), bias.shape[:2], strict=True)
        )
        bias_spec = P(row, head, None, None, axes)
    # Static limits stay static: only traced limits are arguments.
    traced = [limit for limit in limits if isinstance(limit, jax.Array)]

    def body(q, keys, values, info, bias, sinks, numbers, traced, at) -> jax.Array:
        arrays = iter(traced)
        local_limits = tuple(next(arrays) if isinstance(x, jax.Array) else x for x in limits)
        return local(q, keys, values, info, bias, sinks, numbers, local_limits, at, axes=axes)

    return jax.shard_map(
        body,
        mesh=sharding.mesh,
        in_specs=(
            P(rows, heads),
            get_partition_specs(keys, sharding, lead=lead),
            get_partition_specs(values, sharding, lead=lead),
            info_specs,
            bias_spec,
            None if sinks is None else P(heads),
            P(heads),
            [P() for _ in traced],
            tuple(P() for _ in at),
        ),
        out_specs=P(rows, heads),
        check_vma=False,
    )(q, keys, values, info, bias, sinks, numbers, traced, tuple(jnp.asarray(i) for i in at))


KERNELS = (Kernel(_NAME, "cache", "plain XLA, slot blocks", decode_attention),)
