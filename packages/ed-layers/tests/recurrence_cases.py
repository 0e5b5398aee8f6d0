"""Recurrent layers in the ways that they see tokens: whole rows, a cache, a server.

A layer is `run(x, ctx, cache) -> (out, cache)`, jitted; each function here returns the outputs of
sequences, which must be those of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import ragged
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_layers import fixed_order
from ed_layers.cache import HybridCache, RecurrentSpec
from ed_layers.context import Ctx
from ed_layers.native import library
from flax import nnx

Mix = Callable[[Any, Ctx, Any], tuple[Any, Any]]
ONE_ORDER = EasyDeLBaseConfig(batch_invariant=True, sharding_axis_dims=(1, 1, 1, 1, 1))
with_library = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)


def runs(mixer: Any, chunk: int) -> Mix:
    """Return the mixer as a jitted function."""
    graphdef, state = nnx.split(mixer)

    def run(*arguments: Any) -> Any:
        return fixed_order.KernelChoice.get_current().wrap_function(call_mixer)(*arguments)

    def call_mixer(state: Any, x: Any, ctx: Any, cache: Any) -> Any:
        merged = nnx.merge(graphdef, state)
        merged.chunk = chunk
        return merged(x, ctx, cache, 0)

    return partial(jax.jit(run), state)


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


def check_bits(mixer: Any, x: np.ndarray) -> None:
    """Compare the bits of whole rows [4, s, d], of chunks, of a cache and of a server."""
    ones = np.ones(x.shape[:2], np.int32)
    short, long = runs(mixer, 4), runs(mixer, 64)
    with fixed_order.chosen_by(ONE_ORDER):
        whole = np.asarray(long(x, ctx_of(ones), None)[0])
        np.testing.assert_array_equal(short(x, ctx_of(ones), None)[0], whole)
        np.testing.assert_array_equal(in_steps(long, mixer.cache_spec, x, ones), whole)
        for got, row in zip(served(short, mixer.cache_spec, x), whole, strict=True):
            np.testing.assert_array_equal(got, row[: len(got)])


def check_gradients(mixer: Any, x: np.ndarray) -> None:
    """Compare the gradients with sums in one order and the ordinary gradients."""
    graphdef, state = nnx.split(mixer)
    ones = np.ones(x.shape[:2], np.int32)

    def gradients() -> Any:
        def loss(state: Any, x: Any) -> Any:
            merged = nnx.merge(graphdef, state)
            merged.chunk = 4
            call = fixed_order.KernelChoice.get_current().wrap_function(
                lambda x: merged(x, ctx_of(ones), None, 0)[0]
            )
            return jnp.sum(jnp.square(call(x)))

        return jax.jit(jax.grad(loss, (0, 1)))(state, x)

    expected = gradients()
    with fixed_order.chosen_by(ONE_ORDER):
        got = gradients()
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
