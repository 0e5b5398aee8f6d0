"""Recurrent layers in the ways that they see tokens: whole rows, a cache, a server.

A layer is `run(x, ctx, cache) -> (out, cache)`, jitted; each function here returns the outputs of
sequences, which must be those of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from cache_cases import ragged
from ed_infra.masks import MaskInfo
from ed_layers.cache import HybridCache, RecurrentSpec
from ed_layers.context import Ctx

Mix = Callable[[Any, Ctx, Any], tuple[Any, Any]]


def ctx_of(segments: Any, mode: Any = "train") -> Ctx:
    """Of rows without a cache."""
    info = MaskInfo.from_segments(jnp.asarray(segments))
    return Ctx(info.q_index, {}, info, mode=mode)


def in_steps(run: Mix, spec: RecurrentSpec, x: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Rows of one sequence each, with padding anywhere: a prompt, more tokens, one at a time."""
    b, s = real.shape
    cache: Any = HybridCache.create([spec], batch_size=b, capacity=s)
    parts = []
    for now in (slice(0, s - 7), slice(s - 7, s - 2), slice(s - 2, s - 1), slice(s - 1, s)):
        cache, info, positions = cache.begin(jnp.asarray(real[:, now]))
        ctx = replace(ctx_of(real[:, now]), position_ids=positions, mask_info=info, mode="prefill")
        out, cache = run(x[:, now], ctx, cache)
        cache = cache.advance(out.shape[1])
        parts.append(out)
    return np.concatenate(parts, axis=1)


def served(run: Mix, spec: RecurrentSpec, x: np.ndarray) -> list[np.ndarray]:
    """Four sequences: chunks of prompts and single tokens in one step, some wait."""
    n, d = 4, x.shape[-1]
    cache: Any = HybridCache.create_paged([spec], num_pages=1, page_size=4, num_states=n)
    done, got = np.zeros(n, int), [[] for _ in range(n)]
    for counts in ([9, 1, 4, 0], [1, 12, 1, 2], [1, 1, 0, 1], [5, 0, 11, 3]):
        done = done + counts
        batch = ragged([3, 1, 0, 2], counts, done.tolist(), used=n)
        single = max(counts) == 1
        pad = 0 if single else 24 - sum(counts)
        of_token = np.repeat([*range(n), n - 1], [*counts, pad])
        batch = replace(batch, seq_of_token=jnp.asarray(of_token, jnp.int32), decode_only=single)
        flat = [x[i, end - c : end] for i, (end, c) in enumerate(zip(done, counts, strict=True))]
        tokens = np.concatenate([*flat, np.full((pad, d), 7.0, np.float32)])[None]
        ctx = Ctx(batch.positions(), {}, ragged=batch, mode="decode")
        out, cache = run(jnp.asarray(tokens), ctx, cache)
        ends = np.cumsum([0, *counts])
        for i in range(n):
            got[i].append(np.asarray(out)[0, ends[i] : ends[i + 1]])
    return [np.concatenate(parts) for parts in got]
