"""Attention over pages on TPU by jax's ragged paged attention, which reads pages in place.

`ragged_page_attention_v3`, `ragged_page_attention_v2` and `page_attention` are one mechanism,
because jax has one kernel for mixed prompts and decoding. The kernel reads pages [P, page, g, 2, k]
as [P, page, 2g, k] with alternating keys and values. The layers of a stacked pool are consecutive
pages.

Legend: T flat tokens, n sequences, p pages per sequence, P pages, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Paged, Settings, reasons
from ed_layers.attention.kernels.paged import PAGED_NAMES, head_axes
from ed_layers.attention.scoring import get_static_limit, static
from ed_layers.devices import get_mesh, ways

#: The head dim of the kernel: the size of a row of a TPU's memory.
HEAD_DIM = 128
#: Queries and keys per block without `operation_configs`, if the device is absent and jax's table
#: of tuned sizes is therefore unavailable.
_BLOCKS = (32, 1024)
#: Memory for two blocks of keys and values, of the 16 MiB that the smallest TPU has.
BLOCK_BYTES = 4 * 2**20


def _refusals(call: Paged) -> list[str]:
    """Return the reasons why the kernel does not support a call, besides `lacks`."""
    q, pool = call.q, call.pages.pool
    if not isinstance(pool, jax.Array):
        return ["quantized pages"]
    mesh, parts = get_mesh(call.config), 1
    if mesh is not None:
        parts = ways(mesh, head_axes(call))
    heads, groups = q.shape[1] // parts, pool.shape[-3] // parts
    return reasons(
        {
            "a traced window": not static(call.scoring.window),
            f"a head dim of {q.shape[-1]} (it has {HEAD_DIM})": q.shape[-1] != HEAD_DIM,
            f"pages in {pool.dtype}, queries in {q.dtype}": pool.dtype != q.dtype,
            f"{heads} query and {groups} kv heads in {q.dtype}": not fills_tiles(
                heads, groups, q.dtype
            ),
        }
    )


def fills_tiles(heads: int, groups: int, dtype: jnp.dtype) -> bool:
    """Return whether the heads of one device fill the tiles of the kernel in a TPU's memory."""
    packed = 4 // dtype.itemsize  # numbers in a word

    def is_aligned(n: int) -> bool:
        return n % packed == 0 and (n // packed in (1, 2, 4, 8) or n // packed % 8 == 0)

    keys_values = 2 * groups
    if keys_values % (8 * packed) == 0:
        keys_values = 8 * packed
    queries = keys_values // 2 * (heads // groups)
    fits = queries == heads or queries % 8 == 0 or not is_aligned(queries)
    return is_aligned(2 * groups) and fits


def ragged_page_attention(call: Paged) -> Float[Array, "T h k"]:
    """Run the kernel on the heads of each device."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    q, pages, ragged, scoring = call.q, call.pages, call.ragged, call.scoring
    assert isinstance(pages.pool, jax.Array), "refused"
    *_, page_size, groups, _, head_dim = pages.pool.shape
    pool = pages.pool.reshape(-1, page_size, 2 * groups, head_dim)
    table = ragged.page_table[pages.group].astype(jnp.int32)
    if pages.at:
        table = table + jnp.asarray(pages.at[0], jnp.int32) * pages.pool.shape[1]
    pages_per_block, queries_per_block = page_blocks(call.settings, pool, table.shape[1])
    kernel = partial(
        ragged_paged_attention,
        sm_scale=scoring.scale,
        sliding_window=get_static_limit(scoring.window),
        soft_cap=scoring.soft_cap,
        num_kv_pages_per_block=pages_per_block,
        num_queries_per_block=queries_per_block,
    )
    mesh, heads = get_mesh(call.config), head_axes(call)
    # Also on one device: the kernel derives the type of the TPU from the mesh.
    if mesh is not None:
        specs = (P(None, heads), P(None, None, heads), *[P()] * 4)
        kernel = jax.shard_map(
            kernel, mesh=mesh, in_specs=specs, out_specs=P(None, heads), check_vma=False
        )
    out = kernel(q, pool, ragged.kv_lens, table, ragged.cu_q_lens, ragged.num_seqs.reshape(1))
    real = jnp.arange(q.shape[0]) < ragged.cu_q_lens[-1]
    return jnp.where(real[:, None, None], out, 0)


def page_blocks(settings: Settings, pool: jax.Array, pages: int) -> tuple[int | None, int | None]:
    """Return pages and queries per block from `operation_configs`; None = jax's tuned sizes.

    Args:
        pool: [P, page, 2g, k].
        pages: p.
    """
    if settings.is_explicit:
        block_q, block_k = settings.block_q or _BLOCKS[0], settings.block_k or _BLOCKS[1]
    elif jax.default_backend() == "tpu":
        return None, None
    else:
        block_q, block_k = _BLOCKS[0], min(_BLOCKS[1], BLOCK_BYTES // (2 * row_bytes(pool)))
    return max(1, min(block_k // pool.shape[1], pages)), block_q


def row_bytes(pool: jax.Array) -> int:
    """Return the number of bytes of the keys and values of one token."""
    return math.prod(pool.shape[2:]) * pool.dtype.itemsize


KERNELS = tuple(
    Kernel(
        name,
        "pages",
        "ragged paged attention (Pallas)",
        ragged_page_attention,
        platform="tpu",
        language="pallas",
        lacks=frozenset({"ahead", "chunk", "sinks", "value_dim", "alibi", "relative"}),
        refuses=_refusals,
    )
    for name in PAGED_NAMES
)
