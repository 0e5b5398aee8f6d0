"""Operations on rows: in-place writes, and the most probable token of each row.

XLA's CPU backend cannot scatter floats of 8 and 16 bits: it converts the whole array, scatters, and
converts the array back. For a cache, this costs several times the other work of a step.

To find the largest number of a row, XLA's CPU backend compares one number after another. A program
of the native library compares several numbers at the same time.

Legend: N rows of an array, n written rows or rows of logits, v numbers of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ed_layers.native.library import TARGETS, on_whole_arrays


def puts_natively(array: jax.Array) -> bool:
    """Return whether `put_native_rows` is available and faster than a scatter by XLA."""
    small = array.dtype.itemsize <= 2 and jnp.issubdtype(array.dtype, jnp.floating)
    return small and on_whole_arrays()


def put_native_rows(
    array: jax.Array, index: Int[Array, " n"], new: jax.Array, *, axes: int
) -> jax.Array:
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


#: Least number of numbers for which the microseconds of a call are justified.
_LEAST_SIZE = 1 << 12


def finds_argmax(rows: jax.Array) -> bool:
    """Return whether `find_argmax` is available and faster than XLA."""
    return rows.dtype == jnp.float32 and rows.size >= _LEAST_SIZE and on_whole_arrays()


def find_argmax(rows: Float[Array, "n v"]) -> Int[Array, " n"]:
    """Return the first index of the largest number of each row; of a row with NaN, any index."""
    result = jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32)
    return jax.ffi.ffi_call(TARGETS["ed_first_largest"], result, vmap_method="sequential")(rows)
