"""Products and rows of plain arrays, in the form that the platform computes fastest.

XLA's CPU backend computes a bfloat16 product at twice the speed of float32 under three conditions:
the result is float32, there are at least two rows, and the matrix is not transposed. In any other
form XLA converts the matrix first, and needs two to ten times the time (measured on jaxlib 0.10
and 0.12 by `tools.bench.products`). A single row is therefore computed as two equal rows. Sums are
float32 in every form, and the result is rounded once. The native library computes products of few
rows if it is available (`ed_layers.native`).

Legend: i in features, o out features, n rows, m, k, x, y sizes of one matrix of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ed_layers import native


def matmul(
    x: Float[Array, "*rows i"],
    w: jax.Array,
    *,
    transposed: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*rows o"]:
    """Return `x @ w` in the dtype of `x`.

    Args:
        w: [i, o]; or [o, i] if `transposed`, read without a transpose.
        precision: of XLA's product; "high" also permits native products of parts (`native.split`).
    """
    if not (on_cpu_in_halves(x) or goes_native(x, w)):
        return matmul_by_xla(x, w, transposed, precision)
    if goes_native(x, w):
        native.KernelChoice.note("product", x, w, transposed)
    # A mesh for ahead-of-time compilation may have another platform than this process.
    return jax.lax.platform_dependent(
        x,
        w,
        cpu=partial(on_cpu, OnCpu(transposed, precision, native.KernelChoice.get_current())),
        default=partial(matmul_by_xla, transposed=transposed, precision=precision),
    )


def batch_matmul(
    a: jax.Array, b: jax.Array, *, transposed: bool = False, dtype: DTypeLike
) -> jax.Array:
    """Return the products of two stacks of matrices, summed and returned in `dtype`.

    The leading axes are mapped over one pair of matrices: XLA's CPU backend runs other forms
    fourteen times slower, and does not support them for bfloat16.

    Args:
        a: [*lead, m, k].
        b: [*lead, k, n]; or [*lead, n, k] if `transposed`.

    Returns:
        [*lead, m, n].
    """
    lead = tuple(range(a.ndim - 2))
    contracted = ((a.ndim - 1,), (b.ndim - 1 if transposed else b.ndim - 2,))
    rows = a.shape[-2]
    if rows == 1 and on_cpu_in_halves(a):
        a = jnp.concatenate([a, a], axis=-2)
    out = jax.lax.dot_general(a, b, (contracted, (lead, lead)), preferred_element_type=dtype)
    return out[..., :rows, :]


def on_cpu_in_halves(x: jax.Array) -> bool:
    """Return whether a product has bfloat16 operands and may run on a CPU."""
    return x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def goes_native(x: jax.Array, w: jax.Array) -> bool:
    """Return whether the native library computes a product."""
    return native.products.takes(math.prod(x.shape[:-1]), x.dtype, w)


def matmul_by_xla(
    x: jax.Array, w: jax.Array, transposed: bool, precision: jax.lax.PrecisionLike
) -> jax.Array:
    """Return the product, computed by XLA."""
    contracted = ((x.ndim - 1,), (1 if transposed else 0,))
    return jax.lax.dot_general(x, w.astype(x.dtype), (contracted, ((), ())), precision=precision)


class OnCpu(NamedTuple):
    """Static arguments of `on_cpu`.

    Attributes:
        transposed, precision: see `matmul`.
        choice: choice of kernels.
    """

    transposed: bool
    precision: jax.lax.PrecisionLike
    choice: native.KernelChoice


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def on_cpu(static: OnCpu, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the product on a CPU: native, or of bfloat16 operands."""
    transposed, precision, choice = static
    rows = x.reshape(-1, x.shape[-1])
    with choice.restore():
        if goes_native(x, w):
            w = native.products.fastest(w, rows.shape[0], rows.dtype)
            turned = rows.shape[0] >= native.products.LEAST_ROWS_TURNED
            y = native.products.product(
                rows, w, transposed=transposed, turned=turned, precision=precision
            )
        else:
            y = matmul_float32(rows, w.astype(x.dtype), transposed=transposed).astype(x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def on_cpu_forward(static: OnCpu, x: jax.Array, w: jax.Array):
    return on_cpu(static, x, w), (x, w)


def on_cpu_backward(static: OnCpu, saved: tuple[jax.Array, jax.Array], d_y: jax.Array):
    (transposed, precision, choice), (x, w) = static, saved
    with choice.restore():
        d_w = gradient_of_matrix(x, d_y, transposed=transposed, precision=precision)
    return on_cpu(static._replace(transposed=not transposed), d_y, w), d_w.astype(w.dtype)


on_cpu.defvjp(on_cpu_forward, on_cpu_backward)


def gradient_of_matrix(
    x: Float[Array, "*rows i"],
    d_y: Float[Array, "*rows o"],
    *,
    transposed: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Return the float32 gradient of the matrix of `matmul`, in the layout of the matrix."""
    left_operand, right = (d_y, x) if transposed else (x, d_y)
    return gradients_of_matrices(left_operand, [right], precision)[0]


def gradients_of_matrices(
    x: Float[Array, "*rows i"],
    d_ys: Sequence[Float[Array, "*rows _"]],
    precision: jax.lax.PrecisionLike = None,
) -> list[jax.Array]:
    """Return the float32 gradients [i, o] of the matrices of several products of `x`."""
    x, d_ys = x.reshape(-1, x.shape[-1]), [d_y.reshape(-1, d_y.shape[-1]) for d_y in d_ys]
    by_xla = partial(plain_gradients, precision=precision)
    if not native.products.takes_gradients(x, d_ys):
        return by_xla(x, *d_ys)
    return jax.lax.platform_dependent(
        x,
        *d_ys,
        cpu=lambda x, *d_ys: native.products.gradients(x, d_ys, precision),
        default=by_xla,
    )


def plain_gradients(
    x: Float[Array, "n i"], *d_ys: Float[Array, "n _"], precision: jax.lax.PrecisionLike = None
) -> list[jax.Array]:
    """Return the gradients of matrices, computed by XLA."""
    left_operand = x.T
    if on_cpu_in_halves(left_operand):
        # Otherwise XLA fuses the transpose into the product and uses the slow form for both.
        left_operand = jax.lax.optimization_barrier(left_operand)
    product = partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    return [product(left_operand, d_y) for d_y in d_ys]


def matmul_float32(
    x: Float[Array, "n i"], w: jax.Array, *, transposed: bool
) -> Float[Array, "n o"]:
    """Return the product of two matrices in float32, computed by XLA."""
    rows = x.shape[0]
    if rows == 1 and transposed:
        # An explicit transpose is faster only here: each result is a sum over a row of `w`.
        return jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    if rows == 1:
        x = jnp.concatenate([x, x])
    axes = (((1,), (1 if transposed else 0,)), ((), ()))
    y = jax.lax.dot_general(x, w, axes, preferred_element_type=jnp.float32)
    return y[:rows]


def gather_rows(
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
