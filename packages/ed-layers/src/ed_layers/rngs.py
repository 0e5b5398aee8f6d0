"""Keys for initial values, drawn without a variable that counts."""

from __future__ import annotations

import jax
from flax import nnx


class Stream(nnx.RngStream):
    """The keys of `nnx.RngStream`, which count in Python.

    flax counts in an array. Where a module is traced, for shapes or for a jitted creation, each
    update of it looks through everything that was traced before.
    """

    def __init__(self, key: jax.Array, *, tag: str) -> None:
        super().__init__(key, tag=tag)
        self.drawn = 0

    def __call__(self) -> jax.Array:
        key = jax.random.fold_in(self.key.get_value(), self.drawn)
        self.drawn += 1
        return key


def layer_rngs(key: jax.Array) -> nnx.Rngs:
    """`nnx.Rngs(params=key)`: the same keys, quicker to draw."""
    rngs = nnx.Rngs()
    setattr(rngs, "params", Stream(key, tag="params"))  # noqa: B010
    return rngs
