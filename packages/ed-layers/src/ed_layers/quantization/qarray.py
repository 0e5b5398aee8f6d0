"""`QArray`: a quantized matrix that products use without a decoded copy.

Legend: i in features, o out features, n groups along i, k values of a group, e experts, r rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers import native
from ed_layers.devices import get_triton_precision
from ed_layers.quantization import products_gpu
from ed_layers.quantization.formats import FORMATS
from ed_layers.quantization.stored import Scales, Stored, interleave_halves

#: Number of values that a CPU decodes at a time: 8 MB of float32, which fit into caches. Products
#: with larger matrices run over blocks of columns; on other platforms the compiler does this.
_BLOCK = 2**21


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray(Stored):
    """A quantized matrix, used as an `ed_layers.projections.dot.Product`.

    Only the other operand of a product has a gradient.
    """

    def product(self, x: Float[Array, "*rows i"], *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        return _product(ProductRule(precision, native.KernelChoice.get_current()), x, self)

    @staticmethod
    def fit(weights: Sequence[QArray], rows: int, dtype: DTypeLike) -> bool:
        """See `ed_layers.projections.dot.Together`."""
        quantize_rows = weights[0].activations
        takes = partial(native.products.takes_codes, rows, dtype, quantize_rows=quantize_rows)
        return all(
            w.axis == -2 and w.activations == quantize_rows and takes(w.codes) for w in weights
        )

    @staticmethod
    def products(
        x: Float[Array, "n i"], weights: Sequence[QArray], epilogue: native.products.Epilogue
    ) -> list[jax.Array]:
        """See `ed_layers.projections.dot.Together`."""
        codes, quantize_rows = [to_native_matrix(w) for w in weights], weights[0].activations
        return native.products.products_of_codes(
            x, codes, quantize_rows=quantize_rows, epilogue=epilogue
        )

    def grouped_product(
        self,
        rows: Float[Array, "r i"],
        counts: Int[Array, " e"],
        *,
        precision: PrecisionLike = None,
    ) -> Float[Array, "r o"]:
        """Return `jax.lax.ragged_dot` with a stack [e, i, o]."""
        return _multiply_groups(precision, rows, self, counts)

    @property
    def T(self) -> Turned:
        """Return the matrix [d, v] of a table [v, d]."""
        return Turned(self)

    @property
    def factors_out(self) -> bool:
        """Whether a product can be scaled afterwards, column by column."""
        return self.axis == -2 and self.groups == 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turned:
    """The matrix [d, v] of a table [v, d], for a head that is tied to an embedding."""

    table: QArray

    @property
    def T(self) -> QArray:
        """The table."""
        return self.table

    @property
    def shape(self) -> tuple[int, ...]:
        """(d, v)."""
        *lead, v, d = self.table.shape
        return (*lead, d, v)

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the matrix as a plain array."""
        return self.table.dense(dtype).mT

    def product(self, x: Float[Array, "*rows d"], *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., v], in the dtype of `x`."""
        return _product(ProductRule(precision, native.KernelChoice.get_current()), x, self)


def quantize_activations(x: Float[Array, "*rows i"], groups: int) -> tuple[jax.Array, jax.Array]:
    """Quantize activations to 8 bits: whole numbers [*rows, n, k], and a scale for each row and
    group."""
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    scale = jnp.max(jnp.abs(grouped), axis=-1) * np.float32(1 / 127)
    return jnp.round(grouped / jnp.where(scale == 0, 1, scale)[..., None]), scale


class ProductRule(NamedTuple):
    """Static arguments of a product.

    Attributes:
        precision: of XLA's products.
        choice: choice of kernels.
    """

    precision: PrecisionLike
    choice: native.KernelChoice


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(rule: ProductRule, x: jax.Array, w: QArray | Turned) -> jax.Array:
    stored = w.table if isinstance(w, Turned) else w
    if isinstance(w, Turned):
        block_product = (
            _turned_whole_numbers
            if stored.activations
            else partial(_multiply_turned, rule.precision)
        )
    else:
        block_product = (
            _whole_numbers if w.activations else partial(_multiply_decoded, rule.precision)
        )
    by_xla = partial(_in_blocks, block_product)
    # Groups must run along the contracted dimension.
    fits = stored.axis == (-1 if isinstance(w, Turned) else -2)
    rows = math.prod(x.shape[:-1])
    takes = native.products.takes_codes
    with rule.choice.restore():
        if fits and products_gpu.supports(rule.choice, rows, x.dtype, stored):
            native.KernelChoice.note("codes", x, w, "Triton")
            precision = get_triton_precision(x.dtype)
            return products_gpu.multiply_codes(x, stored, precision=precision)
        if not fits or not takes(rows, x.dtype, stored.codes, quantize_rows=stored.activations):
            if fits and stored.ndim == 2:
                native.KernelChoice.note("codes", x, w, "XLA")
            return by_xla(x, w)
        native.KernelChoice.note("codes", x, w, "native")
        return jax.lax.platform_dependent(x, w, cpu=_by_library, default=by_xla)


def _by_library(x: Float[Array, "*rows i"], w: QArray | Turned) -> Float[Array, "*rows o"]:
    """Return the product of the native library, which reads the codes."""
    turned = isinstance(w, Turned)
    stored = w.table if turned else w
    rows = x.reshape(-1, x.shape[-1])
    matrices = (to_native_matrix(stored),)
    quantize_rows = stored.activations
    (y,) = native.products.products_of_codes(
        rows, matrices, transposed=turned, quantize_rows=quantize_rows
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


def to_native_matrix(w: QArray) -> native.products.QuantizedMatrix:
    """Return the matrix in the format of the native library."""
    scale, zero, form = w.scale, w.zero, FORMATS[w.format]
    if isinstance(scale, Scales):
        scale = scale.numbers()
    if zero is not None:
        zero = zero if zero.dtype == jnp.uint8 else zero.astype(jnp.float32)
        zero = jnp.broadcast_to(zero, scale.shape)
    table = form.level(jnp.arange(16, dtype=jnp.int32)) if form.packed else None
    return native.products.QuantizedMatrix(w.codes, scale, zero, table)


def _product_forward(
    rule: ProductRule, x: jax.Array, w: QArray | Turned
) -> tuple[jax.Array, QArray | Turned]:
    # The backward pass stores codes, never the decoded matrix.
    return _product(rule, x, w), w


def _product_backward(
    rule: ProductRule, w: QArray | Turned, g: jax.Array
) -> tuple[jax.Array, None]:
    back = partial(_turned_back if isinstance(w, Turned) else _back, rule.precision)
    return _in_blocks(back, g, w, summed=True), None


_product.defvjp(_product_forward, _product_backward)


def _multiply_decoded(
    precision: PrecisionLike, x: Float[Array, "*rows i"], w: QArray
) -> Float[Array, "*rows o"]:
    """Multiply by the values of the codes; if a column has one scale, multiply by the levels and
    scale the result."""
    halves = w.halves()
    decode = w.levels if w.factors_out else w.values
    dot = partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    if w.axis == -1:  # groups run along the columns
        y = dot(x, interleave_halves([decode(codes) for codes in halves], -1).astype(x.dtype))
    else:
        parts = [x[..., i :: len(halves)] for i in range(len(halves))]
        decoded = (decode(codes).astype(x.dtype) for codes in halves)
        first, *remaining_parts = (
            dot(part, values) for part, values in zip(parts, decoded, strict=True)
        )
        y = sum(remaining_parts, first)
    return (y * w.scales()[..., 0, :] if w.factors_out else y).astype(x.dtype)


def _back(
    precision: PrecisionLike, g: Float[Array, "*rows o"], w: QArray
) -> Float[Array, "*rows i"]:
    """Return the product with the transpose, float32."""
    dot = partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    if w.axis == -1:
        return dot(g, w.dense(g.dtype).mT)
    return interleave_halves(
        [dot(g, w.values(codes).astype(g.dtype).mT) for codes in w.halves()], -1
    )


def _multiply_turned(
    precision: PrecisionLike, x: Float[Array, "*rows d"], w: Turned
) -> Float[Array, "*rows v"]:
    """Do the work of `_multiply_decoded` for a table.

    The decoded values are transposed, because the product transposes codes more slowly.
    """
    halves, table = w.table.halves(), w.table
    dot = partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    parts = [x[..., i :: len(halves)] for i in range(len(halves))]
    decoded = (table.values(codes).astype(x.dtype).mT for codes in halves)
    first, *remaining_parts = (
        dot(part, values) for part, values in zip(parts, decoded, strict=True)
    )
    return sum(remaining_parts, first).astype(x.dtype)


def _turned_whole_numbers(x: Float[Array, "*rows d"], w: Turned) -> Float[Array, "*rows v"]:
    return _whole_numbers(x, w.table.transpose())


def _turned_back(
    precision: PrecisionLike, g: Float[Array, "*rows v"], w: Turned
) -> Float[Array, "*rows d"]:
    dot = partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    halves = [dot(g, w.table.values(codes).astype(g.dtype)) for codes in w.table.halves()]
    return interleave_halves(halves, -1)


def _whole_numbers(x: Float[Array, "*rows i"], w: QArray) -> Float[Array, "*rows o"]:
    """Return the product of 8-bit whole numbers, summed in 32 bits, group by group."""
    assert w.axis == -2, "groups of a product lie along the contracted dimension"
    numbers, row_scales = quantize_activations(x, w.groups)
    halves = w.halves()
    grouped = [w.levels(codes).reshape(w.groups, -1, w.shape[-1]) for codes in halves]

    def add(
        total: jax.Array, group: tuple[jax.Array, Sequence[jax.Array], jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        a, columns, row, scale = group
        for i, b in enumerate(columns):
            part = a[..., i :: len(columns)].astype(jnp.int8)
            y = jnp.matmul(part, b.astype(jnp.int8), preferred_element_type=jnp.int32)
            total = total + y.astype(jnp.float32) * row[..., None] * scale
        return total, None

    parts = jnp.moveaxis(numbers, -2, 0), grouped, jnp.moveaxis(row_scales, -1, 0), w.scales()
    total = jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32)
    if w.groups == 1:
        return add(total, jax.tree.map(lambda part: part[0], parts))[0].astype(x.dtype)
    return jax.lax.scan(add, total, parts)[0].astype(x.dtype)


def _in_blocks(
    product: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    w: QArray | Turned,
    summed: bool = False,
) -> jax.Array:
    """Compute a product; on a CPU by blocks of columns, so that the whole matrix is never decoded.

    Args:
        product: `(x, matrix) -> y`.
        x: [*rows, i]; [*rows, o] if the results of the blocks are `summed`.
    """
    inputs, columns = w.shape[-2:]
    count = -(-inputs * columns // _BLOCK)
    # Groups along the columns are not split.
    if count == 1 or (isinstance(w, QArray) and w.axis == -1):
        return product(x, w).astype(x.dtype)
    size = -(-columns // count)
    axis = -2 if isinstance(w, Turned) else -1  # of the stored columns

    def blocks(x: jax.Array, w: QArray | Turned) -> jax.Array:
        stored = w.table if isinstance(w, Turned) else w
        codes = stored.codes
        if jnp.issubdtype(codes.dtype, jnp.floating):  # a slice would be a float32 copy
            codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        stored = replace(stored, codes=codes, scale=stored.scales())

        def slice_leaf(leaf: jax.Array, start: jax.Array, axis: int) -> jax.Array:
            if leaf.shape[axis] == 1:
                return leaf
            return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)

        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            # The last block begins earlier, so that all blocks have the same size.
            start = jnp.minimum(i * size, columns - size)
            part = jax.tree.map(lambda leaf: slice_leaf(leaf, start, axis), stored)
            part = Turned(part) if isinstance(w, Turned) else part
            if not summed:
                y = product(x, part)
                return jax.lax.dynamic_update_slice_in_dim(out, y, start, axis=-1)
            fresh = start + jnp.arange(size) >= i * size
            return out + product(jnp.where(fresh, slice_leaf(x, start, -1), 0), part)

        shape = (*x.shape[:-1], inputs if summed else columns)
        start = jnp.zeros(shape, jnp.float32 if summed else x.dtype)
        return jax.lax.fori_loop(0, count, step, start).astype(x.dtype)

    def multiply_at_once(x: jax.Array, w: QArray | Turned) -> jax.Array:
        return product(x, w).astype(x.dtype)

    return jax.lax.platform_dependent(x, w, cpu=blocks, default=multiply_at_once)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_groups(
    precision: PrecisionLike, rows: jax.Array, w: QArray, counts: jax.Array
) -> jax.Array:
    if w.activations:
        numbers, scale = quantize_activations(rows, w.groups)
        rows = (numbers * scale[..., None]).reshape(rows.shape).astype(rows.dtype)
    if not w.factors_out:
        return jax.lax.ragged_dot(rows, w.dense(rows.dtype), counts, precision=precision)
    levels = interleave_halves([w.levels(codes) for codes in w.halves()], -2).astype(rows.dtype)
    y = jax.lax.ragged_dot(rows, levels, counts, precision=precision)
    ends, places = jnp.cumsum(counts), jnp.arange(rows.shape[0])
    expert = jnp.searchsorted(ends, places, side="right", method="compare_all")
    return (y * w.scales()[jnp.minimum(expert, w.shape[0] - 1), 0]).astype(rows.dtype)


def _grouped_forward(precision: PrecisionLike, rows: jax.Array, w: QArray, counts: jax.Array):
    return _multiply_groups(precision, rows, w, counts), (w, counts)


def _grouped_backward(precision: PrecisionLike, residuals: tuple[QArray, jax.Array], g: jax.Array):
    w, counts = residuals
    back = jax.lax.ragged_dot(g, w.dense(g.dtype).mT, counts, precision=precision)
    return back, None, None


_multiply_groups.defvjp(_grouped_forward, _grouped_backward)
