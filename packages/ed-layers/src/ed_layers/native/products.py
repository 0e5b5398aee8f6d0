"""Products of the native library, as functions of arrays.

Legend: n rows, i in features, o out features, g groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from ed_layers.native.library import TARGETS, in_use

#: Up to this many rows the library's products are taken: with more, XLA's are as fast. Measured by
#: tools.bench.products.
MOST_ROWS = 64
#: The same of codes, which XLA has to decode first.
MOST_ROWS_OF_CODES = 256
#: Numbers of a matrix from which a call of the library is worth its few microseconds.
LEAST_SIZE = 1 << 14

NUMBERS = (jnp.float32, jnp.bfloat16)
CODES = (jnp.int8, jnp.uint8, jnp.float8_e4m3fn)


def takes(rows: int, dtype: DTypeLike, w: jax.Array) -> bool:
    """Whether `product` is there, and faster than XLA, for rows of a dtype and a matrix w."""
    return (
        0 < rows <= MOST_ROWS
        and w.size >= LEAST_SIZE
        and dtype in NUMBERS
        and w.dtype in NUMBERS
        and in_use()
    )


def takes_codes(rows: int, dtype: DTypeLike, codes: jax.Array, *, whole: bool = False) -> bool:
    """Whether `product_of_codes` is there, and faster than XLA, for rows of a dtype and codes."""
    return (
        rows > 0
        and (whole or rows <= MOST_ROWS_OF_CODES)
        and codes.size >= LEAST_SIZE // 2
        and codes.ndim == 2
        and dtype in NUMBERS
        and codes.dtype in CODES
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
    codes: Int[Array, "_ o"] | Float[Array, "i o"],
    scale: Float[Array, "g o"],
    zero: Num[Array, "g o"] | None = None,
    table: Float[Array, " 16"] | None = None,
    *,
    transposed: bool = False,
    whole: bool = False,
) -> Float[Array, "n o"]:
    """`x @ ((levels - zero) * scale)` in the dtype of `x`, summed in float32. No gradient.

    Args:
        codes: int8 or float8_e4m3fn [i, o], which are the levels; or uint8 [i / 2, o], two four-bit
            codes in a byte, the even input in the lower half, whose levels `table` has.
        scale: of groups of i / g inputs, float32 or float8_e8m0fnu.
        zero: of the same groups, float32 or uint8.
        transposed: codes, scale and zero are [o, ..] instead.
        whole: x is rounded to 8 bits, by its groups, and multiplied by whole numbers; codes of four
            bits are then whole numbers themselves, whatever `table` says.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0 if transposed else 1]), x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_product_of_codes"], result, vmap_method="sequential")
    zero = jnp.zeros((0, 0), jnp.float32) if zero is None else zero
    table = jnp.zeros((0,), jnp.float32) if table is None else table
    return call(x, codes, scale, zero, table, transposed=transposed, whole=whole)
