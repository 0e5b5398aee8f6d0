"""Small arrays that XLA stores in memory, for one order of sums (`ed_layers.fixed_order`).

XLA repeats the operations of a small array for each number of a large array that is computed from
the small one. The state of a recurrent layer has thousands of numbers for each decay of a token,
and an exponential in one order is a long polynomial.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ed_layers import fixed_order
from ed_layers.native import products


def exp(x: jax.Array) -> jax.Array:
    """Return `fixed_order.exp(x)`, which is computed once."""
    return stored(fixed_order.exp(x))


def stored(x: jax.Array) -> jax.Array:
    """Return the same numbers; in one order of sums, XLA stores them."""
    return _stored(x) if fixed_order.in_part() and x.size > 0 else x


@jax.custom_jvp
def _stored(x: jax.Array) -> jax.Array:
    # A sum of one product; XLA does not know what the native library computes.
    return products.product(jnp.ones((1, 1), x.dtype), x.reshape(1, -1)).reshape(x.shape)


_stored.defjvps(lambda tangent, _, __: tangent)
