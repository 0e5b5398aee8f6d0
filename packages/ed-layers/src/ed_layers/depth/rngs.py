"""Random keys for initial values, without a counter variable."""

from __future__ import annotations

import jax
from flax import nnx


class Stream(nnx.RngStream):
    """The keys of `nnx.RngStream`, with a counter in Python.

    flax counts in an array. While a module is traced, each update of that array searches
    everything that was traced before.
    """

    def __init__(self, key: jax.Array, *, tag: str) -> None:
        super().__init__(key, tag=tag)
        self.drawn = 0

    def __call__(self) -> jax.Array:
        key = jax.random.fold_in(self.key.get_value(), self.drawn)
        self.drawn += 1
        return key


def layer_rngs(key: jax.Array) -> nnx.Rngs:
    """Return `nnx.Rngs(params=key)` with the same keys, which are faster to draw."""
    rngs = nnx.Rngs()
    setattr(rngs, "params", Stream(key, tag="params"))  # noqa: B010
    return rngs
