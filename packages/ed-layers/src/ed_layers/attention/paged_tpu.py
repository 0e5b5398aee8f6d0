"""Attention over pages on TPU: jax's ragged paged attention, which reads pages where they lie.

`ragged_page_attention_v3`, `ragged_page_attention_v2` and `page_attention` are one mechanism: jax
ships one kernel for prompts and decoding, mixed. Our pages [P, page, g, 2, k] are what it reads as
[P, page, 2g, k], keys and values in turn; layers of a stacked pool are pages behind each other.

Legend: T flat tokens, n sequences, p pages per sequence, P pages, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.native import limit_of, native_platform, static, taken
from ed_layers.attention.paged import paged_attention
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.paged import Pages
from ed_layers.cache.ragged import RaggedBatch

#: Numbers in a row of a TPU's memory: the head dim that the kernel has.
LANES = 128
#: Queries and keys per block where `operation_configs` says none, and jax's table of tuned sizes
#: cannot be asked, because the device is not here.
BLOCKS = (32, 1024)
#: Memory for two blocks of keys and values, of the 16 MiB that the smallest TPU has.
BLOCK_BYTES = 4 * 2**20


def ragged_page_attention(
    name: str,
    q: Float[Array, "T h k"],
    pages: Pages,
    ragged: RaggedBatch,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "T h d"]:
    """Causal attention of a flat batch; see `attend`. Padding tokens get zeros."""
    if native_platform(mechanism, name) == "tpu":
        missing = refusals(q, pages, scoring, mechanism)
        if taken(mechanism, name, "ragged paged attention (Pallas)", missing):
            return on_tpu(name, q, pages, ragged, scoring, mechanism)
    return paged_attention(q, pages, ragged, scoring, mechanism)


def refusals(q: jax.Array, pages: Pages, scoring: Scoring, mechanism: Mechanism) -> list[str]:
    """What the kernel cannot do of what a call asks for."""
    if not isinstance(pages.pool, jax.Array):
        return ["quantized pages"]
    groups, (_, ways) = pages.pool.shape[-3], split_of(q, pages, mechanism)
    heads = q.shape[1] // ways, groups // ways
    reasons = {
        "the window is traced": not static(scoring.window),
        "chunks": scoring.chunk is not None,
        "sinks": scoring.sinks is not None,
        "values of another width": q.shape[-1] != (pages.value_dim or q.shape[-1]),
        f"a head dim of {q.shape[-1]}, not of {LANES}": q.shape[-1] != LANES,
        f"pages in {pages.pool.dtype}, queries in {q.dtype}": pages.pool.dtype != q.dtype,
        f"{heads[0]} query and {heads[1]} kv heads in {q.dtype}": not tiled(*heads, q.dtype),
    }
    return [reason for reason, holds in reasons.items() if holds]


def tiled(heads: int, groups: int, dtype: jnp.dtype) -> bool:
    """Whether the heads of one device fill tiles of a TPU's memory as the kernel cuts them."""
    packed = 4 // dtype.itemsize  # numbers in a word

    def whole(n: int) -> bool:
        return n % packed == 0 and (n // packed in (1, 2, 4, 8) or n // packed % 8 == 0)

    keys_values = 2 * groups
    if keys_values % (8 * packed) == 0:
        keys_values = 8 * packed
    queries = keys_values // 2 * (heads // groups)
    fits = queries == heads or queries % 8 == 0 or not whole(queries)
    return whole(2 * groups) and fits


def split_of(q: jax.Array, pages: Pages, mechanism: Mechanism) -> tuple[P, int]:
    """How [T, h, k] is split over devices, if kv heads are split alike; and how many ways."""
    mesh = getattr(mechanism.config, "mesh", None)
    if mesh is None or mesh.size == 1:
        return P(), 1
    heads = (q.shape[0], pages.pool.shape[-3])
    spec = mechanism.config.partition_manager.resolve((None, "heads"), "decode", heads, mesh)
    axes = (*spec, None, None)[1]
    axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
    return spec, math.prod(mesh.shape[axis] for axis in axes)


def on_tpu(
    name: str,
    q: Float[Array, "T h k"],
    pages: Pages,
    ragged: RaggedBatch,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "T h k"]:
    """The kernel, on each device's heads."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    assert isinstance(pages.pool, jax.Array), "refused"
    *_, page_size, groups, _, head_dim = pages.pool.shape
    pool = pages.pool.reshape(-1, page_size, 2 * groups, head_dim)
    table = ragged.page_table[pages.group].astype(jnp.int32)
    if pages.at:
        table = table + jnp.asarray(pages.at[0], jnp.int32) * pages.pool.shape[1]
    pages_per_block, queries_per_block = blocks_of(name, pool, table.shape[1], mechanism)
    kernel = partial(
        ragged_paged_attention,
        sm_scale=scoring.scale,
        sliding_window=limit_of(scoring.window),
        soft_cap=scoring.soft_cap,
        num_kv_pages_per_block=pages_per_block,
        num_queries_per_block=queries_per_block,
    )
    given = (q, pool, ragged.kv_lens, table, ragged.cu_q_lens, ragged.num_seqs.reshape(1))
    spec, ways = split_of(q, pages, mechanism)
    mesh = getattr(mechanism.config, "mesh", None)
    # On one device, too: from its mesh the kernel learns which TPU it is compiled for.
    if mesh is not None:
        heads = (*spec, None, None)[1] if ways > 1 else None
        specs = (P(None, heads), P(None, None, heads), *[P()] * 4)
        kernel = jax.shard_map(
            kernel, mesh=mesh, in_specs=specs, out_specs=P(None, heads), check_vma=False
        )
    out = kernel(*given)
    real = jnp.arange(q.shape[0]) < ragged.cu_q_lens[-1]
    return jnp.where(real[:, None, None], out, 0)


def blocks_of(
    name: str, pool: jax.Array, pages: int, mechanism: Mechanism
) -> tuple[int | None, int | None]:
    """Pages and queries per block: from `operation_configs`, else jax's tuned sizes (None).

    Args:
        pool: [P, page, 2g, k].
        pages: p.
    """
    given = dict(mechanism.settings).get(name)
    if given is None and jax.default_backend() == "tpu":
        return None, None
    if given is None:
        block_q, block_k = BLOCKS[0], min(BLOCKS[1], BLOCK_BYTES // (2 * row_bytes(pool)))
    else:
        block_q, block_k = given.block_q or BLOCKS[0], given.block_k or BLOCKS[1]
    return max(1, min(block_k // pool.shape[1], pages)), block_q


def row_bytes(pool: jax.Array) -> int:
    """Bytes of the keys and values of one token."""
    return math.prod(pool.shape[2:]) * pool.dtype.itemsize
