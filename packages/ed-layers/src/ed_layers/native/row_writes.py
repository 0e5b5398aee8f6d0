"""Writing rows of an array where it lies.

XLA's CPU backend scatters no floats of 8 and 16 bits: it converts the whole array, scatters, and
converts the whole array back. Of a cache that is many times the work of a step.

Legend: N rows of an array, n of them written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ed_layers.native.library import TARGETS, in_use


def takes(array: jax.Array) -> bool:
    """Whether `put` is there, and faster than a scatter by XLA."""
    small = array.dtype.itemsize <= 2 and jnp.issubdtype(array.dtype, jnp.floating)
    return small and in_use()


def put(array: jax.Array, index: Int[Array, " n"], new: jax.Array, *, axes: int) -> jax.Array:
    """`array` [*N, *row] with the rows `new` [n, *row] at `index`, in place if it may be.

    Rows at an index outside of the array are dropped. It is not reshaped: XLA would copy it.

    Args:
        axes: first axes of the array that count its rows.
    """
    result = jax.ShapeDtypeStruct(array.shape, array.dtype)
    call = jax.ffi.ffi_call(
        TARGETS["ed_put"], result, vmap_method="sequential", input_output_aliases={0: 0}
    )
    return call(array, index.astype(jnp.int32), new.astype(array.dtype), axes=axes)
