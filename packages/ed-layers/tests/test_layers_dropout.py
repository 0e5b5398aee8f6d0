"""Dropout by a hash of places."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.dropout import apply_dropout, kept_places


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_expected_share_of_each_row_and_column(rate: float) -> None:
    kept = np.asarray(kept_places(jax.random.key(0), rate, (512, 512)))
    spread = np.sqrt(rate * (1 - rate) / 512)
    assert abs(kept.mean() - (1 - rate)) < 5 * spread / np.sqrt(512)
    for axis in (0, 1):
        assert np.abs(kept.mean(axis) - (1 - rate)).max() < 5 * spread
        # Neighbours are independent.
        one, other = np.split(kept, 2, axis)
        pairs = (one & other).mean()
        assert abs(pairs - (1 - rate) ** 2) < 0.005
    other = np.asarray(kept_places(jax.random.key(1), rate, (512, 512)))
    assert abs((kept & other).mean() - (1 - rate) ** 2) < 0.005


def test_dropout_scales_kept_numbers_and_repeats_with_its_key() -> None:
    x = jnp.full((4, 50), 3.0)
    y = apply_dropout(x, 0.25, jax.random.key(3))
    np.testing.assert_allclose(np.unique(np.asarray(y)), [0, 4], rtol=1e-6)
    np.testing.assert_array_equal(y, apply_dropout(x, 0.25, jax.random.key(3)))
    np.testing.assert_array_equal(apply_dropout(x, 1.0, jax.random.key(3)), jnp.zeros_like(x))
