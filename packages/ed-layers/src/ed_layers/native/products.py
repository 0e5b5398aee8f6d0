"""Products of the native library, as functions of arrays.

Legend: n rows, i in features, o out features, g groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.native.library import TARGETS, in_use

#: Up to this many rows the library's products are taken: with more, XLA's are as fast. Measured by
#: tools.bench.products.
MOST_ROWS = 64
#: The same of codes, which XLA has to decode first.
MOST_ROWS_OF_CODES = 256
#: Numbers of a matrix from which a call of the library is worth its few microseconds.
LEAST_SIZE = 1 << 14

NUMBERS = (jnp.float32, jnp.bfloat16)


def takes(rows: int, dtype: DTypeLike, w: jax.Array) -> bool:
    """Whether `product` is there, and faster than XLA, for rows of a dtype and a matrix w."""
    return (
        0 < rows <= MOST_ROWS
        and w.size >= LEAST_SIZE
        and dtype in NUMBERS
        and w.dtype in NUMBERS
        and in_use()
    )


def takes_codes(rows: int, dtype: DTypeLike, codes: jax.Array) -> bool:
    """Whether `product_of_codes` is there, and faster than XLA, for rows of a dtype and codes."""
    return (
        0 < rows <= MOST_ROWS_OF_CODES
        and codes.size >= LEAST_SIZE // 2
        and codes.ndim == 2
        and dtype in NUMBERS
        and codes.dtype in (jnp.int8, jnp.uint8)
        and in_use()
    )


def product(
    x: Float[Array, "n i"], w: jax.Array, *, transposed: bool = False
) -> Float[Array, "n o"]:
    """`x @ w` in the dtype of `x`, summed in float32; both float32 or bfloat16. No gradient.

    Args:
        w: [i, o]; or [o, i] if `transposed`, read as it lies.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0 if transposed else 1]), x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_product"], result, vmap_method="sequential")
    return call(x, w, transposed=transposed)


def product_of_codes(
    x: Float[Array, "n i"],
    codes: Int[Array, "_ o"],
    scale: Float[Array, "g o"],
    zero: Float[Array, "g o"] | None = None,
    table: Float[Array, " 16"] | None = None,
) -> Float[Array, "n o"]:
    """`x @ ((values - zero) * scale)` in the dtype of `x`, summed in float32. No gradient.

    Args:
        codes: int8 [i, o], which are the values; or uint8 [i / 2, o], two four-bit codes in a byte,
            the even input in the lower half, whose values `table` has.
        scale, zero: of groups of i / g inputs, float32.
    """
    o = codes.shape[1]
    result = jax.ShapeDtypeStruct((x.shape[0], o), x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_product_of_codes"], result, vmap_method="sequential")
    zero = jnp.zeros((0, o), jnp.float32) if zero is None else zero
    table = jnp.zeros((0,), jnp.float32) if table is None else table
    return call(x, codes, scale, zero, table)
