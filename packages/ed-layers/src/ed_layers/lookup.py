"""Lookups of rows in a table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def rows_of(
    table: Shaped[Array, "*dims"], ids: Int[Array, "*rows"], *, axis: int
) -> Shaped[Array, "*dims"]:
    """Return the rows of the given indices along an axis.

    XLA's CPU backend converts rows of less than 32 bits to larger numbers and back. Before a loop
    of decoding, XLA would convert the whole table, because the table is the same in each turn. The
    barrier ties the table to the indices, which change.
    """
    small = jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize < 4
    if small and jax.default_backend() == "cpu":
        table, ids = jax.lax.optimization_barrier((table, ids))
    return jnp.take(table, ids, axis=axis)
