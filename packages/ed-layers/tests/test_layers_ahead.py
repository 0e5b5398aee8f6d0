"""Queries that attend to later keys: every mechanism equals the full score matrix."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_pages import KV_LENS, Q_LENS, batch, page_table
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.attention.kernel import MECHANISMS
from ed_layers.cache import LayerCacheSpec, PagedCache

HEADS, GROUPS, DIM = 4, 2, 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def runs(lengths: list[int], size: int, seed: int) -> np.ndarray:
    """Return the number of later tokens of the same image, for rows of texts with random images."""
    ahead, draw = np.zeros(size, np.int32), np.random.default_rng(seed)
    start = 0
    for length in lengths:
        at = start
        while at < start + length:
            count = min(int(draw.integers(1, 40)), start + length - at)
            if draw.random() < 0.6:
                ahead[at : at + count] = np.arange(count)[::-1]
            at += count
        start += length
    return ahead


def expected(q, k, v, allowed: np.ndarray) -> np.ndarray:
    """Return attention in float64 from the definition; `allowed` is [b, s, t]."""
    k, v = (np.repeat(x.astype(np.float64), HEADS // GROUPS, axis=2) for x in (k, v))
    scores = np.einsum("bshk,bthk->bhst", q.astype(np.float64), k) * DIM**-0.5
    scores = np.where(allowed[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhst,bthk->bshk", weights, v)


def allowed(segments, index, ahead, window: int | None) -> np.ndarray:
    """Return which pairs attend, from the definition: [s, s]."""
    s = len(segments)
    result = np.zeros((s, s), bool)
    for query, key in itertools.product(range(s), range(s)):
        result[query, key] = (
            segments[query] == segments[key] != 0
            and index[key] <= index[query] + ahead[query]
            and (window is None or index[query] - index[key] < window)
        )
    return result


CAN = [n for n, a in MECHANISMS.items() if a.reads == "projected" and "ahead" in a.features]


@pytest.mark.daily("None-blockwise")
@pytest.mark.parametrize("name", CAN)
@pytest.mark.parametrize("window", [None, 17])
def test_mechanism_equals_the_definition_with_gradients(name, window):
    lengths = [70, 90]
    segments = np.repeat([1, 2, 0], [*lengths, 10])[None].astype(np.int32)
    ahead = runs(lengths, 170, seed=1)[None]
    info = replace(MaskInfo.from_segments(segments), ahead=jnp.asarray(ahead))
    q, k, v = (normal(n, 1, 170, heads, DIM) for n, heads in enumerate((HEADS, GROUPS, GROUPS)))
    index = np.asarray(info.q_index)[0]
    mask = allowed(segments[0], index, ahead[0], window)
    real = segments[0] != 0

    def run(q, k, v, mechanism):
        return attend(q, k, v, info, window=window, mechanism=mechanism)[0]

    def loss(arrays, mechanism):
        return jnp.sum(jnp.sin(run(*arrays, mechanism))[:, real])

    got = run(q, k, v, Mechanism(name))
    want = expected(q[:, real], k[:, real], v[:, real], mask[None][:, real][:, :, real])
    np.testing.assert_allclose(got[:, real], want, atol=3e-6)
    own, vanilla = (jax.grad(loss)((q, k, v), Mechanism(m)) for m in (name, "vanilla"))
    for a, b in zip(own, vanilla, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.nightly
def test_pages_equal_the_definition(window):
    ahead = np.concatenate([runs([n], n, seed) for seed, n in enumerate(Q_LENS)])
    q = normal(0, 1, Q_LENS.sum(), HEADS, DIM)
    k, v = (normal(seed, 1, KV_LENS.sum(), GROUPS, DIM) for seed in (1, 2))

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, 6), (0, 0), (0, 0)))

    cache = PagedCache.create([LayerCacheSpec(GROUPS, DIM)], num_pages=page_table()[1], page_size=4)
    before = KV_LENS - Q_LENS
    ragged, tokens = batch(before, before)
    cache, _ = cache.update(0, (padded(k[:, tokens]), padded(v[:, tokens])), ragged=ragged)
    ragged, tokens = batch(Q_LENS, KV_LENS)
    ragged = replace(ragged, ahead=jnp.asarray(np.pad(ahead, (0, 6)), jnp.int32))
    arrays = padded(q), padded(k[:, tokens]), padded(v[:, tokens])
    options = {"cache": cache, "ragged": ragged, "window": window, "mechanism": Mechanism()}
    got, _ = jax.jit(lambda *x: attend(*x, None, **options))(*arrays)
    ends, starts = np.cumsum(Q_LENS), np.cumsum(KV_LENS) - KV_LENS
    for number, (n, total) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        at = slice(ends[number] - n, ends[number])
        keys = slice(starts[number], starts[number] + total)
        whole = np.pad(ahead[at], (total - n, 0))
        mask = allowed(np.ones(total), np.arange(total), whole, window)[None, total - n :]
        want = expected(q[:, at], k[:, keys], v[:, keys], mask)
        np.testing.assert_allclose(np.asarray(got)[:, at], want, atol=3e-6)


def test_mechanism_without_the_feature_raises_config_error():
    info = replace(MaskInfo.full(1, 8), ahead=jnp.zeros((1, 8), jnp.int32))
    x = normal(0, 1, 8, 2, DIM)
    with pytest.raises(ConfigError, match="'ring' cannot do ahead"):
        attend(x, x, x, info, mechanism=Mechanism("ring"))
