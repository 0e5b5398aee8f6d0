"""A float32 matrix in panels: in the order in which the native library reads the numbers.

A product of few rows is limited by memory, which is read fastest in one long run. The rows of a
plain matrix interrupt the run: a task reads 64 of the columns.

Legend: i in features, o out features, p panels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers import native
from ed_layers.native.products import LEAST_SIZE, PANEL, takes_panels
from ed_layers.projections.matmul import matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A matrix [i, o], used as an `ed_layers.projections.linear.Product`.

    Only the other operand of a product has a gradient: a model in panels is served, not trained.

    Attributes:
        numbers: float32 [p, i, PANEL]; panel k contains the columns from `k * PANEL` on.
    """

    numbers: Float[Array, "p i _"]

    @classmethod
    def of(cls, w: Float[Array, "i o"]) -> Panels:
        """Copy a matrix; see `can_be`."""
        return cls(jnp.swapaxes(w.reshape(w.shape[0], -1, PANEL), 0, 1))

    @staticmethod
    def can_be(w: jax.Array) -> bool:
        """Return whether panels can contain a matrix, and are faster."""
        whole = w.ndim == 2 and w.shape[1] % PANEL == 0
        return whole and w.dtype == jnp.float32 and w.size >= LEAST_SIZE

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        panels, i, columns = self.numbers.shape
        return i, panels * columns

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the matrix as a plain array."""
        w = jnp.swapaxes(self.numbers, 0, 1).reshape(self.shape)
        return w if dtype is None else w.astype(dtype)

    def product(self, x: Float[Array, "*rows i"], *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        return _product(precision, x, self)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: PrecisionLike, x: jax.Array, w: Panels) -> jax.Array:
    if not takes_panels(math.prod(x.shape[:-1]), x.dtype):
        return matmul(x, w.dense(), precision=precision)
    rows = x.reshape(-1, x.shape[-1])
    (y,) = native.products.products(rows, (w.numbers,))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _product_forward(
    precision: PrecisionLike, x: jax.Array, w: Panels
) -> tuple[jax.Array, tuple[jax.Array, Panels]]:
    return _product(precision, x, w), (x, w)


def _product_backward(
    precision: PrecisionLike, saved: tuple[jax.Array, Panels], d_y: jax.Array
) -> tuple[jax.Array, None]:
    x, w = saved
    return matmul(d_y, w.dense(), transposed=True, precision=precision).astype(x.dtype), None


_product.defvjp(_product_forward, _product_backward)
