"""`autoregressive_decodeattn`: attention of few queries to a long contiguous cache.

An online softmax over blocks of slots, from the first that a window lets see to the last written,
whatever the capacity. Quantized storage is read as codes; slots that are split over devices are
read where they are, and only softmax sums are exchanged. No gradient: caches are for generating.

Legend: b batch, s queries, h heads, g kv heads, r heads per kv head, t slots, k key dim, d value
dim, x queries in a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ed_layers.attention.hardware import platform_of
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.partial import (
    Slots,
    blocks_of,
    bounds_of,
    merge_devices,
    normalised,
    part_of,
)
from ed_layers.attention.scoring import Scoring, split_heads
from ed_layers.cache.protocol import Stored
from ed_layers.cache.sharded import first_slot, specs_of

NAME = "autoregressive_decodeattn"

# Splits of a block that an accelerator computes side by side; a CPU core has nothing to split for.
SPLITS = 16


def decode_attention(
    q: Float[Array, "b s h k"], stored: Stored, scoring: Scoring, mechanism: Mechanism
) -> Float[Array, "b s h d"]:
    """Attention to what a contiguous cache has stored; see `attend`."""
    b, s, h, k_dim = q.shape
    groups = stored.keys.shape[-3]
    splits = 1 if platform_of(mechanism.config) == "cpu" else SPLITS
    block_q, block_k = mechanism.blocks(NAME, s, stored.keys.shape[-2])
    grouped = q.reshape(b, s, groups, h // groups, k_dim).transpose(0, 2, 3, 1, 4)
    bias = None if scoring.bias is None else split_heads(scoring.bias, groups, h // groups)
    sinks = None if scoring.sinks is None else scoring.sinks.reshape(groups, -1, 1, 1)
    scoring = replace(scoring, bias=None, sinks=None)
    by_sum = stored.layout == "leaves" and (b, s) == (1, 1)

    def local(q, keys, values, info, bias, sinks, limits, at, names: Any = None) -> jax.Array:
        """[b, g, r, s, d] of the slots at hand, merged over the devices along `names`."""
        limited = replace(scoring, window=limits[0], chunk=limits[1])
        slots = Slots(keys, values, at, *blocks_of(splits, block_k, keys.shape[-2]))
        first: Any = 0
        if names is not None:
            assert stored.sharding is not None
            first = first_slot(stored.sharding, slots.count)

        def of_queries(q: jax.Array, info: MaskInfo, bias: jax.Array | None) -> jax.Array:
            bounds = (0, slots.count)
            if stored.ordered and info.causal:
                bounds = bounds_of(info, limited, slots.count, first)
            part = part_of(q, slots, info, limited, bias, bounds, by_sum=by_sum)
            if names is not None:
                part = merge_devices(part, names)
            return normalised(part, sinks)

        return by_query_blocks(of_queries, q, info, bias, block_q)

    arguments = (
        *(grouped, stored.keys, stored.values, stored.mask_info, bias, sinks),
        *((scoring.window, scoring.chunk), stored.at),
    )
    if stored.sharding is None:
        out = local(*arguments)
    else:
        out = over_devices(local, arguments, stored.sharding)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, s, h, -1).astype(q.dtype)


def by_query_blocks(of_queries: Any, q: jax.Array, info: MaskInfo, bias: Any, size: int) -> Any:
    """A prompt goes block by block, so that each visits only the slots that it sees."""
    s = q.shape[3]
    if s <= size:
        return of_queries(q, info, bias)
    pad, count = -s % size, -(-s // size)

    def cut(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, pad if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths)
        shape = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def block(parts: Any) -> jax.Array:
        q_x, segments, index, bias_x = parts
        return of_queries(q_x, replace(info, q_segment_ids=segments, q_index=index), bias_x)

    queries = (cut(q, 3), cut(info.q_segment_ids, 1), cut(info.q_index, 1))
    out = jax.lax.map(block, (*queries, None if bias is None else cut(bias, 3)))
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :s]


def over_devices(local: Any, arguments: tuple, sharding: NamedSharding) -> jax.Array:
    """Run `local` where the slots are: rows and heads apart, slots merged."""
    q, keys, values, info, bias, sinks, limits, at = arguments
    rows, heads, names = sharding.spec[:3]
    lead = len(at)
    row_spec, slot_spec = P(rows), P(rows, names)
    info_specs: Any = replace(
        info,
        q_segment_ids=row_spec,  # type: ignore[arg-type]  # a tree of specs, like the arrays
        kv_segment_ids=slot_spec,  # type: ignore[arg-type]
        q_index=row_spec,  # type: ignore[arg-type]
        kv_index=slot_spec,  # type: ignore[arg-type]
    )
    bias_spec = None
    if bias is not None:
        row, head = (
            axis if size > 1 else None
            for axis, size in zip((rows, heads), bias.shape[:2], strict=True)
        )
        bias_spec = P(row, head, None, None, names)
    # Plain numbers stay numbers: only what is traced goes in as an argument.
    traced = [i for i in limits if isinstance(i, jax.Array)]

    def body(q, keys, values, info, bias, sinks, traced, at) -> jax.Array:
        given = iter(traced)
        own = tuple(next(given) if isinstance(i, jax.Array) else i for i in limits)
        return local(q, keys, values, info, bias, sinks, own, at, names=names)

    return jax.shard_map(
        body,
        mesh=sharding.mesh,
        in_specs=(
            P(rows, heads),
            specs_of(keys, sharding, lead=lead),
            specs_of(values, sharding, lead=lead),
            info_specs,
            bias_spec,
            None if sinks is None else P(heads),
            [P() for _ in traced],
            tuple(P() for _ in at),
        ),
        out_specs=P(rows, heads),
        check_vma=False,
    )(q, keys, values, info, bias, sinks, traced, tuple(jnp.asarray(i) for i in at))
