"""The most probable token of each row.

XLA's CPU backend compares the numbers of a row one after another.

Legend: n rows, v numbers of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ed_layers.native.library import TARGETS, on_whole_arrays

#: Least number of numbers for which the microseconds of a call are justified.
_LEAST_SIZE = 1 << 12


def takes(rows: jax.Array) -> bool:
    """Return whether `find_argmax` is available and faster than XLA."""
    return rows.dtype == jnp.float32 and rows.size >= _LEAST_SIZE and on_whole_arrays()


def find_argmax(rows: Float[Array, "n v"]) -> Int[Array, " n"]:
    """Return the first index of the largest number of each row; of a row with NaN, any index."""
    result = jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32)
    return jax.ffi.ffi_call(TARGETS["ed_first_largest"], result, vmap_method="sequential")(rows)
