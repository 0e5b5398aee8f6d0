"""Rows of a contiguous cache: padding is not counted, the end is not passed over in silence."""

from __future__ import annotations

from typing import Any

import cache_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import BOUNDS, LAYERS, SPECS, G, K, sequence, whole
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import DenseCache, Format, HybridCache, LayerCacheSpec, WindowCache

VANILLA, DECODE = Mechanism(), Mechanism(decode="autoregressive_decodeattn")
NEAR = LayerCacheSpec(G, K, window=4)


def padded(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray, list[list[np.ndarray]]]:
    """Three rows of 14 places: padded on the left, nowhere, and here and there; and each alone."""
    segments = np.ones((3, 14), np.int32)
    segments[0, :3] = 0
    segments[2, [0, 4, 5, 9, 13]] = 0
    rows = [sequence(14, seed=seed + row) for row in range(3)]
    for row, kept in zip(rows, segments, strict=True):
        for x in row:
            x[:, kept == 0] = 9.0
    alone = [[x[:, kept != 0] for x in row] for row, kept in zip(rows, segments, strict=True)]
    return [np.concatenate(x) for x in zip(*rows, strict=True)], segments, alone


@pytest.mark.nightly
@pytest.mark.parametrize("mechanism", [VANILLA, DECODE], ids=["vanilla", "decode"])
@pytest.mark.parametrize(
    ("specs", "features"),
    [
        (SPECS, {"chunk": 4}),
        (SPECS, {"window": 4}),
        ([NEAR] * LAYERS, {"window": 4}),
        ([NEAR] * LAYERS, {"window": 4, "chunk": 4}),
    ],
    ids=["chunk", "window", "ring", "ring of chunks"],
)
def test_padding_shifts_neither_chunks_nor_windows(specs, features, mechanism):
    """A row has the outputs of the row without padding, at any position of the padding."""
    qkv, segments, alone = padded()
    cache = HybridCache.create(specs, batch_size=3, capacity=16)
    group = specs[0].group
    call = {"segments": segments, "mechanism": mechanism, "group": group, **features}
    for steps in ([9, 1, 1, 1, 1, 1], [2, 5, 1, 6]):
        out = cases.in_steps(cache, qkv, steps, **call)
        for row, kept, own in zip(out, segments, alone, strict=True):
            assert cases.error(row[None, kept != 0], whole(own, **features)) <= BOUNDS[None]
            assert not row[kept == 0].any(), "padding sees nothing"


@pytest.mark.nightly
def test_cache_positions_count_only_real_tokens():
    for cache in (DenseCache.create(SPECS, batch_size=2, capacity=9), ring(rows=2)):
        first = jnp.asarray([[0, 1, 1], [1, 1, 0]])
        cache, _, positions = cache.begin(first)
        np.testing.assert_array_equal(positions, [[0, 0, 1], [0, 1, 1]])
        cache, _, positions = cache.advance(3).begin(jnp.asarray([[1, 0], [0, 1]]))
        np.testing.assert_array_equal(positions, [[2, 2], [1, 2]])
        np.testing.assert_array_equal(cache.tokens, [3, 3])


def ring(rows: int = 1, **options: Any) -> WindowCache:
    return WindowCache.create([NEAR] * LAYERS, batch_size=rows, capacity=9, **options)


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_a_fresh_cache_can_be_donated(kind, layout):
    options: Any = {"batch_size": 1, "capacity": 8, "layout": layout}
    cache: Any = {
        "dense": lambda: DenseCache.create(SPECS, **options),
        "window": lambda: ring(layout=layout),
        "hybrid": lambda: HybridCache.create([NEAR, LayerCacheSpec(G, K)], **options),
    }[kind]()
    qkv: list[Any] = sequence(1)

    def step(cache: Any) -> Any:
        cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))
        group = "full" if kind == "dense" else "window"
        cache = attend(*qkv, info, cache=cache, group=group, mechanism=VANILLA)[1]
        return cache.advance(1)

    run = jax.jit(step, donate_argnums=0)
    held = jax.tree.leaves(cache)
    run(run(cache))
    assert all(x.is_deleted() for x in held)


# The end of a row.


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_cache_overflow_raises_value_error(kind, layout):
    options: Any = {"batch_size": 2, "capacity": 4, "layout": layout}
    cache: Any = DenseCache.create(SPECS, **options)
    if kind == "hybrid":
        cache = HybridCache.create([NEAR, LayerCacheSpec(G, K)], **options)
    four = jnp.asarray([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    cache, *_ = cache.begin(four)
    cache = cache.advance(6)
    cache.begin(jnp.asarray([[0], [1]]))
    with pytest.raises(ValueError, match=r"a row gets 5 tokens in a cache for 4.*max_length=5"):
        cache.begin(jnp.asarray([[1], [0]]))
    with pytest.raises(ValueError, match="gets 6 tokens in a cache for 4"):
        jax.eval_shape(lambda cache: cache.begin(jnp.ones((2, 6), jnp.int32)), cache)


@pytest.mark.daily("chunk")
@pytest.mark.parametrize(
    ("features", "mechanism", "format"),
    [({"window": 3}, VANILLA, None), ({"chunk": 3}, DECODE, None), ({}, DECODE, "int8")],
    ids=["window", "chunk", "int8"],
)
def test_too_many_tokens_are_no_answer_inside_jit(features, mechanism, format):
    """A row that exceeds its cache produces NaN; the other row is unaffected."""
    long, short = sequence(14), sequence(14, seed=1)
    segments = np.ones((2, 14), np.int32)
    segments[1, [0, 1, 11]] = 0
    qkv = [np.concatenate(x) for x in zip(long, short, strict=True)]
    options: Any = {"format": Format(format) if format else None}
    cache = DenseCache.create(SPECS, batch_size=2, capacity=11, **options)
    call = {"segments": segments, "mechanism": mechanism, **features}
    out = cases.in_steps(cache, qkv, [8, 1, 1, 1, 2, 1], **call)
    assert np.isnan(out[0, 11:]).all(), "the twelfth token and those behind it"
    assert cases.error(out[:1, :11], whole([x[:, :11] for x in long], **features)) <= BOUNDS[format]
    kept = segments[1] != 0
    own = whole([x[:, kept] for x in short], **features)
    assert cases.error(out[1:, kept], own) <= BOUNDS[format]


@pytest.mark.nightly
def test_a_ring_has_no_end():
    qkv = sequence(30)
    cache = HybridCache.create([NEAR] * LAYERS, batch_size=1, capacity=9).simplest()
    assert isinstance(cache, WindowCache)
    assert cache.capacity is None
    out = cases.in_steps(cache, qkv, [6, 1, 20, 3], mechanism=VANILLA, group="window", window=4)
    assert cases.error(out, whole(qkv, window=4)) <= BOUNDS[None]


def test_a_window_that_no_row_outgrows_is_kept_whole():
    cache = HybridCache.create([NEAR] * LAYERS, batch_size=1, capacity=4).simplest()
    assert isinstance(cache, DenseCache)
    with pytest.raises(ValueError, match="whose window is shorter than the 3 tokens of a row"):
        WindowCache.create([NEAR], batch_size=1, capacity=3)


def test_cache_updates_require_begin_and_advance():
    cache = ring()
    kv: Any = sequence(2)[1:]
    with pytest.raises(ValueError, match=r"advance\(2\) ends a step of 2 places, but none has"):
        cache.advance(2)
    cache, info, _ = cache.begin(jnp.ones((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="but one of 2 has: call begin"):
        cache.advance(1)
    with pytest.raises(ValueError, match="receives the tokens of a step"):
        ring().update(0, kv, mask_info=info)
    with pytest.raises(ValueError, match="needs mask_info"):
        cache.update(0, kv)
    with pytest.raises(ValueError, match="gave no keys and values"):
        cache.update(0, None, mask_info=info)
    with pytest.raises(ValueError, match="gave no values"):
        cache.update(0, (kv[0], None), mask_info=info)
