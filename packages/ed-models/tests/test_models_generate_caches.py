"""What beams and drafts ask of caches: rows in another order, and tokens forgotten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.cache import (
    DenseCache,
    Format,
    HybridCache,
    LayerCacheSpec,
    RecurrentSpec,
    StateSpec,
)

B, N = 5, 4  # no other dimension is 5
FULL = LayerCacheSpec(num_kv_heads=2, head_dim=8)
WINDOW = LayerCacheSpec(num_kv_heads=2, head_dim=8, group="sliding", window=6)
STATES = RecurrentSpec((StateSpec("conv", (3, 7)), StateSpec("ssm", (2, 8))))


def random(cache):
    leaves, structure = jax.tree.flatten(cache)
    rng = np.random.default_rng(0)
    filled = [jnp.asarray(rng.integers(0, 100, x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, filled)


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize("format", [None, Format("int8")])
def test_cache_row_selection_reorders_every_array(layout, format):
    cache = HybridCache.create(
        [FULL, WINDOW, STATES, (FULL, STATES)],
        batch_size=B,
        capacity=16,
        layout=layout,
        format=format,
    )
    cache, index = random(cache), jnp.asarray([3, 0, 0, 4])
    picked = cache.select_rows(index)
    before, after = jax.tree.leaves(cache), jax.tree.leaves(picked)
    assert len(before) == len(after) > 8
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(y, np.asarray(x).take(index, axis=x.shape.index(B)))
    assert jax.tree.structure(picked) == jax.tree.structure(cache)


def keys(n, seed=0):
    x = np.random.default_rng(seed).standard_normal((B, n, 2, 8))
    return jnp.asarray(x, jnp.float32)


def step(cache, x):
    cache, mask, positions = cache.begin(jnp.ones(x.shape[:2], jnp.int32))
    cache, stored = cache.update(0, (x, x), mask_info=mask)
    return cache.advance(x.shape[1]), stored, positions


@pytest.mark.nightly
@pytest.mark.parametrize("specs", [[FULL], [FULL, FULL.__class__(2, 8, group="other")]])
def test_rewound_tokens_leave_no_trace_in_cache(specs):
    """Drafts that are taken back, and other tokens in their place: as if nothing had been."""
    kind = DenseCache if len(specs) == 1 else HybridCache
    empty = kind.create(specs, batch_size=B, capacity=16)
    assert empty.can_rewind
    begun, *_ = step(empty, keys(4))
    drafted, *_ = step(begun, keys(3, seed=1))
    kept = jnp.asarray([0, 1, 2, 3, 0])
    back = drafted.rewind(begun.tokens + kept)
    np.testing.assert_array_equal(back.tokens, 4 + kept)
    cache, stored, positions = step(back, keys(1, seed=2))
    np.testing.assert_array_equal(positions[:, 0], 4 + kept)
    held = np.asarray(stored.mask_info.kv_segment_ids)
    np.testing.assert_array_equal(held.sum(axis=1), 5 + kept)
    for row, count in enumerate(4 + kept):
        expected = np.concatenate([keys(4)[row], keys(3, seed=1)[row]])[:count]
        expected = np.concatenate([expected, keys(1, seed=2)[row]])
        np.testing.assert_array_equal(stored.k[row, :, : count + 1], expected.swapaxes(0, 1))
    assert jax.tree.structure(cache) == jax.tree.structure(begun)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [WINDOW, STATES])
def test_rewind_of_windowed_or_recurrent_cache_raises_value_error(spec):
    cache = HybridCache.create([FULL, spec], batch_size=B, capacity=16)
    assert not cache.can_rewind
    with pytest.raises(ValueError, match="cannot drop"):
        cache.rewind(jnp.zeros((B,), jnp.int32))
