"""Products of the native library, as functions of arrays.

Legend: n rows, i in features, o out features, g groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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

#: Activations that the library knows, by Hugging Face's names: numbers of `Gate` in product.h.
ACTS = {"silu": 1, "swish": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2}

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
    return products(x, (w,), transposed=transposed)[0]


def products(
    x: Float[Array, "n i"],
    matrices: Sequence[jax.Array],
    *,
    transposed: bool = False,
    act: str | None = None,
) -> list[jax.Array]:
    """As `product`, of several matrices in one call: a result [n, o] for each.

    Args:
        act: a name of `ACTS`: there are two matrices of one shape, and the result is one,
            `act(x @ first) * (x @ second)`.
    """
    widths = [w.shape[0 if transposed else 1] for w in matrices]
    results = results_of(x, widths, act)
    call = jax.ffi.ffi_call(TARGETS["ed_product"], results, vmap_method="sequential")
    return call(x, *matrices, transposed=transposed, act=number_of(act))


class Codes(NamedTuple):
    """A matrix of codes, `(levels - zero) * scale`.

    Attributes:
        codes: int8 or float8_e4m3fn [i, o], which are the levels; or uint8 [i / 2, o], two four-bit
            codes in a byte, the even input in the lower half, whose levels `table` has.
        scale: of groups of i / g inputs, float32 or float8_e8m0fnu.
        zero: of the same groups, float32 or uint8; None = 0.
        table: of four-bit codes alone.
    """

    codes: Int[Array, "_ o"] | Float[Array, "i o"]
    scale: Float[Array, "g o"]
    zero: Num[Array, "g o"] | None = None
    table: Float[Array, " 16"] | None = None


def products_of_codes(
    x: Float[Array, "n i"],
    matrices: Sequence[Codes],
    *,
    transposed: bool = False,
    whole: bool = False,
    act: str | None = None,
) -> list[jax.Array]:
    """The product of `x` and each matrix in the dtype of `x`, summed in float32. No gradient.

    Args:
        transposed: codes, scale and zero are [o, ..] instead.
        whole: x is rounded to 8 bits, by its groups, and multiplied by whole numbers; codes of four
            bits are then whole numbers themselves, whatever `table` says.
        act: as for `products`.
    """
    results = results_of(x, [of.codes.shape[0 if transposed else 1] for of in matrices], act)
    call = jax.ffi.ffi_call(TARGETS["ed_product_of_codes"], results, vmap_method="sequential")
    arrays: list[jax.Array] = []
    for codes, scale, zero, table in matrices:
        zero = jnp.zeros((0, 0), jnp.float32) if zero is None else zero
        arrays += codes, scale, zero, jnp.zeros((0,), jnp.float32) if table is None else table
    return call(x, *arrays, transposed=transposed, whole=whole, act=number_of(act))


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
    """As `products_of_codes`, of the one matrix `Codes(codes, scale, zero, table)`."""
    matrix = Codes(codes, scale, zero, table)
    return products_of_codes(x, (matrix,), transposed=transposed, whole=whole)[0]


def results_of(
    x: Float[Array, "n i"], widths: Sequence[int], act: str | None
) -> list[jax.ShapeDtypeStruct]:
    """What a call returns; one array where an activation joins two products."""
    kept = widths if act is None else widths[:1]
    return [jax.ShapeDtypeStruct((x.shape[0], width), x.dtype) for width in kept]


def number_of(act: str | None) -> np.int64:
    """The library's number of an activation."""
    return np.int64(0 if act is None else ACTS[act])
