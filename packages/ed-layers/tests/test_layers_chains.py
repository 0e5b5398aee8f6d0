"""Chains of drafts: each link attends to its row up to the chain's start, and to its own chain."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.attention import attend
from ed_layers.attention.mechanism import Mechanism
from ed_layers.cache.chains import ChainCache
from ed_layers.cache.spec import LayerCacheSpec

ROWS, LENGTH, HEADS, DIM, LINKS = 2, 7, 2, 4, 3
#: Segments of the rows: two documents, and padding at the end.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]], np.int32)
PLACES = np.array([[0, 2, 5], [3, 1, 4]], np.int32)


def draw(seed: int, length: int) -> list[np.ndarray]:
    """Return queries, keys and values [b, length, h, k]."""
    shape = (3, ROWS, length, HEADS, DIM)
    return [*np.random.default_rng(seed).normal(size=shape).astype(np.float32)]


def compute_expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Return the attention of a query [h, k] to the last of some keys and values [t, h, k]."""
    k, v = (x[-(window or len(x)) :] for x in (k, v))
    scores = np.einsum("hk,thk->ht", q, k) * DIM**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("ht,thk->hk", weights, v)


@pytest.mark.parametrize("window", [None, 3])
def test_links_attend_to_the_row_before_them_and_to_their_chain(window: int | None) -> None:
    mechanism, row = Mechanism(), draw(0, LENGTH)
    cache = ChainCache.create([LayerCacheSpec(HEADS, DIM)])
    cache, mask, positions = cache.begin(jnp.asarray(SEGMENTS))
    out, cache = attend(*row, mask, cache=cache, layer=0, window=window, mechanism=mechanism)
    plain, _ = attend(*row, mask, window=window, mechanism=mechanism)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(positions[0], [0, 1, 2, 3, 0, 1, 2])
    cache = cache.advance(LENGTH).start_chains(jnp.asarray(PLACES))
    count = PLACES.shape[1]
    links = [draw(1 + link, count) for link in range(LINKS)]
    for number, link in enumerate(links):
        cache, mask, positions = cache.begin(jnp.ones(PLACES.shape, jnp.int32))
        out, cache = attend(*link, mask, cache=cache, layer=0, window=window, mechanism=mechanism)
        cache = cache.advance(count)
        for b, c in np.ndindex(*PLACES.shape):
            start = int(np.flatnonzero(SEGMENTS[b] == SEGMENTS[b, PLACES[b, c]])[0])
            prefix = slice(start, PLACES[b, c] + 1)
            keys, values = (
                np.concatenate(
                    [row[i][b, prefix], *(x[i][b, c : c + 1] for x in links[: number + 1])]
                )
                for i in (1, 2)
            )
            expected = compute_expected(link[0][b, c], keys, values, window)
            np.testing.assert_allclose(out[b, c], expected, atol=1e-5)
            assert int(positions[b, c]) == PLACES[b, c] - start + number + 1


def test_links_of_no_chain_attend_to_nothing() -> None:
    cache = ChainCache.create([LayerCacheSpec(HEADS, DIM)])
    cache, mask, _ = cache.begin(jnp.asarray(SEGMENTS))
    _, cache = attend(*draw(0, LENGTH), mask, cache=cache, layer=0, mechanism=Mechanism())
    cache = cache.advance(LENGTH).start_chains(jnp.asarray([[6, 2], [6, 2]]))
    cache, mask, _ = cache.begin(jnp.asarray([[1, 0], [1, 1]]))
    out, _ = attend(*draw(1, 2), mask, cache=cache, layer=0, mechanism=Mechanism())
    is_zero = np.all(np.asarray(out) == 0, axis=(2, 3))
    np.testing.assert_array_equal(is_zero, [[False, True], [True, False]])
