"""In-place writes of rows of an array.

XLA's CPU backend cannot scatter floats of 8 and 16 bits: it converts the whole array, scatters, and
converts the array back. For a cache, this costs several times the other work of a step.

Legend: N rows of an array, n written rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ed_layers.native.library import TARGETS, on_whole_arrays


def takes(array: jax.Array) -> bool:
    """Return whether `put` is available and faster than a scatter by XLA."""
    small = array.dtype.itemsize <= 2 and jnp.issubdtype(array.dtype, jnp.floating)
    return small and on_whole_arrays()


def put(array: jax.Array, index: Int[Array, " n"], new: jax.Array, *, axes: int) -> jax.Array:
    """Return `array` [*N, *row] with the rows `new` [n, *row] at `index`, written in place if
    possible.

    Rows with an index outside the array are dropped. The array is not reshaped, because XLA would
    copy it.

    Args:
        axes: number of first axes of the array that count its rows.
    """
    result = jax.ShapeDtypeStruct(array.shape, array.dtype)
    call = jax.ffi.ffi_call(
        TARGETS["ed_put"], result, vmap_method="sequential", input_output_aliases={0: 0}
    )
    return call(array, index.astype(jnp.int32), new.astype(array.dtype), axes=axes)
