"""A serving step of decode and prompts through a real paged cache, as attention is tested with it.

Legend: T flat tokens, g kv heads, k head dim, d head dim of values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import ALIBI, BUCKETS, HEAD_DIM, HEADS, Cell, relative_of
from attention_reference import Case, Mask
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import LayerCacheSpec, PagedCache, RaggedBatch

# Length of each sequence in the engine, and how many of its tokens are this step's.
KV_LENS, Q_LENS = np.array([37, 70, 1, 20, 9]), np.array([1, 70, 1, 9, 1])
KV_STARTS, Q_STARTS = np.cumsum(KV_LENS) - KV_LENS, np.cumsum(Q_LENS) - Q_LENS
PAGE_SIZE, PADDING = 4, 6


def case_of(cell: Cell, groups: int = 2, *, seed: int = 0) -> Case:
    """A cell's call: a flat row of queries, and one of keys."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    kv_segments, q_segments = (np.repeat(np.arange(1, 6), n)[None] for n in (KV_LENS, Q_LENS))
    places = [np.arange(n) for n in KV_LENS]
    last = [x[len(x) - n :] for x, n in zip(places, Q_LENS, strict=True)]
    q_index, kv_index = (np.concatenate(x)[None] for x in (last, places))
    return Case(
        q=normal(1, Q_LENS.sum(), HEADS, HEAD_DIM),
        k=normal(1, KV_LENS.sum(), groups, HEAD_DIM),
        v=normal(1, KV_LENS.sum(), groups, cell.value_dim or HEAD_DIM),
        mask=Mask(q_segments, kv_segments, q_index, kv_index),
        window=cell.window,
        chunk=cell.chunk,
        soft_cap=cell.soft_cap,
        sinks=normal(HEADS) if cell.sinks else None,
        alibi=ALIBI if cell.alibi else None,
        relative=normal(BUCKETS, HEADS) if cell.relative else None,
    )


def page_table() -> tuple[np.ndarray, int]:
    """Pages of each sequence in no order, [n, p] with an empty slot; and how many pages exist."""
    counts = -(-KV_LENS // PAGE_SIZE)
    numbers = np.random.default_rng(1).permutation(counts.sum() + 3)
    table = np.zeros((len(KV_LENS) + 1, counts.max()), np.int32)
    for row, start, n in zip(table, np.cumsum(counts) - counts, counts, strict=False):
        row[:n] = numbers[start : start + n]
    return table, len(numbers)


def batch(q_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[RaggedBatch, np.ndarray]:
    """The description of a step, and which of the flat keys it writes."""
    table, pages = page_table()
    seq = np.repeat(np.arange(len(q_lens)), q_lens)
    at = np.concatenate([np.arange(n - m, n) for n, m in zip(kv_lens, q_lens, strict=True)])
    slots = table[seq, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
    ends = np.cumsum(q_lens)

    def array(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.int32)

    ragged = RaggedBatch(
        cu_q_lens=array([0, *ends, ends[-1]]),
        kv_lens=array([*kv_lens, 0]),
        seq_of_token=array(np.pad(seq, (0, PADDING))),
        slots={"full": array(np.pad(slots, (0, PADDING), constant_values=pages * PAGE_SIZE))},
        page_table={"full": array(table)},
        state_slots=array(np.zeros(len(table))),
        num_seqs=array(len(q_lens)),
    )
    return ragged, KV_STARTS[seq] + at


@lru_cache(maxsize=4)
def program(mechanism: Mechanism, given: tuple) -> Any:
    """Jitted step; one for all cases that differ in arrays only."""

    @jax.jit
    def step(cache, q, k, v, ragged, sinks, table):
        options = {"cache": cache, "ragged": ragged, "sinks": sinks, **dict(given)}
        options["relative"] = relative_of({"relative": table}, causal=True)
        return attend(q, k, v, None, mechanism=mechanism, **options)

    return step


def run(case: Case, mechanism: Mechanism, fill: float = 0.0) -> np.ndarray:
    """The output of the step; what came before it is in the cache already.

    Args:
        fill: what the pages hold before anything is written, and what tokens of padding hold.
    """

    def padded(x: np.ndarray) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, PADDING), (0, 0), (0, 0)), constant_values=fill)

    spec = LayerCacheSpec(*case.k.shape[2:], value_dim=case.v.shape[-1])
    cache = PagedCache.create([spec], num_pages=page_table()[1], page_size=PAGE_SIZE)
    cache = jax.tree.map(lambda x: x + fill, cache)
    limits = tuple((name, getattr(case, name)) for name in ("window", "chunk", "soft_cap", "alibi"))
    before = KV_LENS - Q_LENS
    ragged, tokens = batch(before, before)
    cache, _ = cache.update(
        0, (padded(case.k[:, tokens]), padded(case.v[:, tokens])), ragged=ragged
    )
    ragged, tokens = batch(Q_LENS, KV_LENS)
    arrays = map(padded, (case.q, case.k[:, tokens], case.v[:, tokens]))
    with jax.default_matmul_precision("highest"):
        out, _ = program(mechanism, limits)(cache, *arrays, ragged, case.sinks, case.relative)
    return np.asarray(out)[:, : case.q.shape[1]]
