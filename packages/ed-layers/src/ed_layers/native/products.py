"""Products of the native library, as functions of arrays.

Legend: n rows, i in features, o out features, g groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, UInt8

from ed_layers import fixed_order
from ed_layers.native import split
from ed_layers.native.library import TARGETS, in_use, level, on_whole_arrays

#: Maximum number of rows for products with codes: with more rows, XLA is as fast, although it must
#: decode them first (tools.bench.products).
MOST_ROWS_OF_CODES = 256
#: Least number of rows for which a transposed matrix is turned.
LEAST_ROWS_TURNED = 65
#: Least number of rows for `gradients`: with fewer, most of the time is needed to turn them.
LEAST_ROWS_OF_GRADIENTS = 64
#: Least number of rows for which a float32 matrix is rounded to bfloat16, if the rows are bfloat16.
LEAST_ROWS_OF_PAIRS = 129
#: Levels that multiply pairs of bfloat16 numbers, at twice the speed of float32.
_PAIRS = ("avx512_bf16", "amx")
#: Minimum size of a matrix: smaller products do not justify the microseconds of a call.
LEAST_SIZE = 1 << 14

#: Number of columns of a panel: `kTile` of product.h.
PANEL = 64

#: Activations of the library by Hugging Face's names: numbers of `Act` in product.h.
ACTS = {
    "silu": 1,
    "swish": 1,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "gelu_fast": 2,
    "gelu_accurate": 2,
    "gelu_python_tanh": 2,
    "gelu": 3,
    "gelu_python": 3,
    "quick_gelu": 4,
    "relu": 5,
}

NUMBERS = (jnp.float32, jnp.bfloat16)
_CODES = (jnp.int8, jnp.uint8, jnp.float8_e4m3fn)


def takes(rows: int, dtype: DTypeLike, w: jax.Array) -> bool:
    """Return whether `product` is available and faster than XLA, for rows of a dtype and a matrix
    w."""
    if not (dtype in NUMBERS and w.dtype in NUMBERS and in_use()):
        return False
    if fixed_order.active():
        return rows > 0 and w.size > 0
    return rows > 0 and w.size >= LEAST_SIZE


def takes_gradients(x: jax.Array, d_ys: Sequence[jax.Array]) -> bool:
    """Return whether `gradients` is available and faster than XLA."""
    return (
        x.dtype in NUMBERS
        and all(d_y.dtype == x.dtype for d_y in d_ys)
        and math.prod(x.shape[:-1]) >= LEAST_ROWS_OF_GRADIENTS
        and x.shape[-1] * min(d_y.shape[-1] for d_y in d_ys) >= LEAST_SIZE
        and not fixed_order.active()
        and on_whole_arrays()
    )


def fastest(w: jax.Array, rows: int, dtype: DTypeLike) -> jax.Array:
    """Return a matrix in the dtype that is fastest for rows of a dtype: many bfloat16 rows are
    multiplied by bfloat16 matrices, as XLA does."""
    rounds = dtype == jnp.bfloat16 and rows >= LEAST_ROWS_OF_PAIRS and level() in _PAIRS
    return w.astype(dtype) if rounds and not fixed_order.active() else w


def takes_panels(rows: int, dtype: DTypeLike) -> bool:
    """Return whether the library multiplies rows of a dtype by panels.

    Every number of rows is supported, because another product would have to restore the matrix.
    """
    return rows > 0 and dtype in NUMBERS and on_whole_arrays()


def takes_codes(
    rows: int, dtype: DTypeLike, codes: jax.Array, *, quantize_rows: bool = False
) -> bool:
    """Return whether `product_of_codes` is available and faster than XLA, for rows of a dtype and
    codes."""
    return (
        rows > 0
        and (quantize_rows or rows <= MOST_ROWS_OF_CODES or fixed_order.active())
        and (codes.size >= LEAST_SIZE // 2 or fixed_order.active())
        and codes.ndim == 2
        and dtype in NUMBERS
        and codes.dtype in _CODES
        and on_whole_arrays()
    )


def product(
    x: Float[Array, "n i"],
    w: jax.Array,
    *,
    transposed: bool = False,
    turned: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "n o"]:
    """Return `x @ w` in the dtype of `x`, summed in float32; both are float32 or bfloat16. No
    gradient.

    Rows of zeros at the end of `x` are padding: they are not multiplied, and their results are
    zeros, even if `w` has values that are not finite.

    Args:
        w: [i, o]; or [o, i] if `transposed`, read without a copy.
        turned: whether parts of a transposed matrix are turned if x has many rows. This is faster,
            but the sums have another order than those of few rows.
        precision: "high" permits products of parts, see `split`.
    """
    return products(x, (w,), transposed=transposed, turned=turned, precision=precision)[0]


class Epilogue(NamedTuple):
    """What follows the products of a call, before they are rounded to the dtype of the result.

    Attributes:
        biases: [o] for each matrix, in the dtype of x; empty = there are none.
        act: a name of `ACTS`; None = no activation.
        gated: whether the result is `act(first product) * second product`. There are then two
            matrices of one shape.
    """

    biases: tuple[jax.Array, ...] = ()
    act: str | None = None
    gated: bool = False

    def attributes(self) -> dict[str, object]:
        """Return the attributes of a call."""
        number = np.int64(0 if self.act is None else ACTS[self.act])
        return {"biased": bool(self.biases), "act": number, "gated": self.gated}

    def results(
        self, rows: int, widths: Sequence[int], dtype: DTypeLike
    ) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the results."""
        result_widths = widths[:1] if self.gated else widths
        return [jax.ShapeDtypeStruct((rows, width), dtype) for width in result_widths]


def products(
    x: Float[Array, "n i"],
    matrices: Sequence[jax.Array],
    *,
    transposed: bool = False,
    turned: bool = False,
    epilogue: Epilogue = Epilogue(),  # noqa: B008
    precision: jax.lax.PrecisionLike = None,
) -> list[jax.Array]:
    """Return the products with several matrices, computed in one call: [n, o] for each matrix.

    Args:
        matrices: [i, o] each; or [o, i] if `transposed`; or panels, see
            `ed_layers.projections.panels`.
        turned, precision: see `product`.
        epilogue: what follows the products.
    """
    dtype, axis = x.dtype, 1 if transposed else 0
    if split.takes(precision, x.shape[0], [x, *matrices]):
        x, matrices = split.split_left(x, 1), [split.right(w, axis) for w in matrices]
    widths = [get_width(w, transposed) for w in matrices]
    results = epilogue.results(x.shape[0], widths, dtype)

    def call(x: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        widths = [get_width(w, transposed) for w in arrays[: len(matrices)]]
        results = epilogue.results(x.shape[0], widths, dtype)
        ffi_call = jax.ffi.ffi_call(TARGETS["ed_product"], results, vmap_method="sequential")
        fixed = fixed_order.active() or (transposed and not turned)
        attributes = {"fixed": fixed, **epilogue.attributes()}
        return [*ffi_call(x, *arrays, transposed=transposed, **attributes)]

    # Each device computes whole sums: for its rows, and for its columns of each matrix.
    matrix_axes = ("heads", None) if transposed else (None, "heads")
    return fixed_order.run_on_shards(
        call,
        (x, *matrices, *epilogue.biases),
        (("batch", None), *[matrix_axes for _ in matrices], *[("heads",) for _ in epilogue.biases]),
        [(("batch", "heads"), y.shape) for y in results],
    )


def gradients(
    x: Float[Array, "n i"],
    d_ys: Sequence[jax.Array],
    precision: jax.lax.PrecisionLike = None,
) -> list[jax.Array]:
    """Return `x.T @ d_y` for each array, float32 [i, o] each, computed in one call. No gradient.

    Args:
        d_ys: gradients of products of `x`, [n, o] each, in the dtype of `x`.
        precision: see `product`.
    """
    if split.takes(precision, x.shape[0], [x, *d_ys]):
        x, d_ys = split.split_left(x, 0), [split.right(d_y, 0) for d_y in d_ys]
    rows, inputs = x.shape
    results = [jax.ShapeDtypeStruct((inputs, d_y.shape[1]), jnp.float32) for d_y in d_ys]
    if x.dtype == jnp.bfloat16:  # memory for the call
        results.append(jax.ShapeDtypeStruct((rows, inputs), jnp.float32))
    call = jax.ffi.ffi_call(TARGETS["ed_gradients"], results, vmap_method="sequential")
    return [*call(x, *d_ys)[: len(d_ys)]]


class QuantizedMatrix(NamedTuple):
    """A quantized matrix, `(levels - zero) * scale`.

    Attributes:
        codes: int8 or float8_e4m3fn [i, o], which are the levels; or uint8 [i / 2, o], two four-bit
            codes in a byte, the even input in the lower half, with levels in `table`.
        scale: scales of groups of i / g inputs: float32, float16 or float8_e8m0fnu.
        zero: zeros of the same groups, float32 or uint8; None = 0.
        table: levels of four-bit codes.
    """

    codes: Int[Array, "_ o"] | Float[Array, "i o"]
    scale: Float[Array, "g o"]
    zero: Num[Array, "g o"] | None = None
    table: Float[Array, " 16"] | None = None


def products_of_codes(
    x: Float[Array, "n i"],
    matrices: Sequence[QuantizedMatrix],
    *,
    transposed: bool = False,
    quantize_rows: bool = False,
    epilogue: Epilogue = Epilogue(),  # noqa: B008
) -> list[jax.Array]:
    """Return the products of `x` and each matrix in the dtype of `x`, summed in float32. No
    gradient.

    Args:
        transposed: whether codes, scale and zero are [o, ..].
        quantize_rows: whether x is rounded to 8 bits, by its groups, and multiplied by whole
            numbers. Four-bit codes are then whole numbers, and `table` is ignored.
        epilogue: see `products`.
    """
    widths = [get_width(of.codes, transposed) for of in matrices]
    results = epilogue.results(x.shape[0], widths, x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_product_of_codes"], results, vmap_method="sequential")
    arrays: list[jax.Array] = []
    for codes, scale, zero, table in matrices:
        zero = jnp.zeros((0, 0), jnp.float32) if zero is None else zero
        arrays += codes, scale, zero, jnp.zeros((0,), jnp.float32) if table is None else table
    arrays += epilogue.biases
    return [*call(x, *arrays, transposed=transposed, whole=quantize_rows, **epilogue.attributes())]


class CodePanelFormat(NamedTuple):
    """How a group of codes is stored in a panel: `PANEL` scales, `PANEL` zeros if there are any,
    and the codes as fours of bytes, [bytes of a column / 4, PANEL, 4].

    Attributes:
        bits: of a code: 4 (two codes in a byte, the even input in the lower half) or 8.
        scale_bytes: 4 (float32) or 2 (float16).
        zero_bytes: 4 (float32), 1 (uint8) or 0 (there are no zeros).
    """

    bits: int
    scale_bytes: int
    zero_bytes: int

    def attributes(self) -> dict[str, object]:
        """Return the attributes of a call."""
        return {name: np.int64(number) for name, number in self._asdict().items()}


def products_of_code_panels(
    x: Float[Array, "n i"],
    matrices: Sequence[UInt8[Array, "p g _"]],
    form: CodePanelFormat,
    epilogue: Epilogue = Epilogue(),  # noqa: B008
) -> list[jax.Array]:
    """Return the products of `x`, rounded to 8 bits by its groups, and each matrix of codes in
    panels: [n, p * PANEL] each, in the dtype of `x`. No gradient."""
    widths = [get_width(w, transposed=False) for w in matrices]
    results = epilogue.results(x.shape[0], widths, x.dtype)
    target = TARGETS["ed_product_of_code_panels"]
    call = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    attributes = form.attributes() | epilogue.attributes()
    return [*call(x, *matrices, *epilogue.biases, **attributes)]


def take_of_code_panels(
    matrix: UInt8[Array, "p g _"], form: CodePanelFormat, at: Int[Array, " n"], inputs: int
) -> Float[Array, "n i"]:
    """Return the columns `at` of a matrix of codes in panels as rows, float32. No gradient."""
    result = jax.ShapeDtypeStruct((*at.shape, inputs), jnp.float32)
    call = jax.ffi.ffi_call(TARGETS["ed_take"], result, vmap_method="sequential")
    return call(matrix, at.astype(jnp.int32), **form.attributes())


def product_of_codes(
    x: Float[Array, "n i"],
    codes: Int[Array, "_ o"] | Float[Array, "i o"],
    scale: Float[Array, "g o"],
    zero: Num[Array, "g o"] | None = None,
    table: Float[Array, " 16"] | None = None,
    *,
    transposed: bool = False,
    quantize_rows: bool = False,
) -> Float[Array, "n o"]:
    """Return `products_of_codes` for the single matrix `Codes(codes, scale, zero, table)`."""
    matrix = QuantizedMatrix(codes, scale, zero, table)
    return products_of_codes(x, (matrix,), transposed=transposed, quantize_rows=quantize_rows)[0]


def get_width(w: jax.Array, transposed: bool) -> int:
    """Return the number of columns of a matrix, or of its panels."""
    return w.shape[0] * PANEL if w.ndim > 2 else w.shape[0 if transposed else 1]
