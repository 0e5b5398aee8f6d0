"""Keys of layers are those of flax, drawn without a counting variable."""

from __future__ import annotations

import jax
import numpy as np
from ed_layers.depth.stack import layer_rngs
from flax import nnx


def test_the_keys_are_those_of_flax():
    key = jax.random.key(7)
    ours, theirs = layer_rngs(key), nnx.Rngs(params=key)
    drawn = [(ours.params(), theirs.params()) for _ in range(4)]
    drawn.append((ours["params"](), theirs["params"]()))
    for one, other in drawn:
        assert np.array_equal(jax.random.key_data(one), jax.random.key_data(other))


def test_under_a_trace_and_for_many_layers_at_once():
    def two(draw):
        def of(key):
            rngs = draw(key)
            return jax.random.key_data(rngs.params()), jax.random.key_data(rngs.params())

        return jax.vmap(of)(jax.random.split(jax.random.key(1), 3))

    ours = jax.jit(lambda: two(layer_rngs))()
    theirs = jax.jit(lambda: two(lambda key: nnx.Rngs(params=key)))()
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
