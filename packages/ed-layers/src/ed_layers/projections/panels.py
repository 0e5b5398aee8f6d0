"""Matrices in panels, the order in which the native library multiplies them.

Memory is read fastest in long runs, and a product of few rows takes as long as its matrix is read.
In the plain order, each thread reads short parts of many rows, and many rows of `x` need a copy in
this order for every product.

Legend: i in features, o out features, n rows, p panels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.fixed_order import KernelChoice
from ed_layers.native.products import (
    LEAST_SIZE,
    NUMBERS,
    PANEL,
    Epilogue,
    products,
    takes_panels,
)
from ed_layers.projections.dot import Weight, dot


class InPanels(ABC):
    """A matrix in panels. Only the other operand of a product has a gradient."""

    @abstractmethod
    def unpack_panels(self) -> Weight:
        """Return the matrix in the plain order."""

    @staticmethod
    @abstractmethod
    def products(
        x: Float[Array, "n i"], weights: Sequence[Any], epilogue: Epilogue
    ) -> list[jax.Array]:
        """See `ed_layers.projections.dot.Together`."""

    @staticmethod
    def fit(weights: Sequence[Any], rows: int, dtype: DTypeLike) -> bool:
        """See `ed_layers.projections.dot.Together`."""
        return takes_panels(rows, dtype)

    def product(self, x: Float[Array, "*rows i"], *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        return _product((precision, KernelChoice.get_current()), x, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels(InPanels):
    """A matrix [i, o] of numbers; its products have the bits of those of the plain matrix.

    Attributes:
        numbers: float32 [p, i, PANEL], or bfloat16 [p, i / 2, PANEL, 2]; panel k contains the
            columns from `k * PANEL` on.
    """

    numbers: Float[Array, "p _ *columns"]

    @classmethod
    def of(cls, w: Float[Array, "i o"]) -> Panels:
        """Copy a matrix; see `can_be`."""
        inputs = 2 if w.dtype == jnp.bfloat16 else 1
        parts = w.reshape(w.shape[0] // inputs, inputs, -1, PANEL)
        numbers = jnp.transpose(parts, (2, 0, 3, 1))
        return cls(numbers if inputs > 1 else numbers[..., 0])

    @staticmethod
    def can_be(w: jax.Array) -> bool:
        """Return whether panels can contain a matrix, and are faster."""
        fits_panels = w.ndim == 2 and w.shape[0] % 2 == 0 and w.shape[1] % PANEL == 0
        return fits_panels and w.dtype in NUMBERS and w.size >= LEAST_SIZE

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        panels, words, columns, *inputs = self.numbers.shape
        return words * math.prod(inputs), panels * columns

    def unpack_panels(self) -> Float[Array, "i o"]:
        """Return the matrix in the plain order."""
        numbers = self.numbers.reshape(*self.numbers.shape[:3], -1)
        return jnp.transpose(numbers, (1, 3, 0, 2)).reshape(self.shape)

    @staticmethod
    def products(
        x: Float[Array, "n i"], weights: Sequence[Panels], epilogue: Epilogue
    ) -> list[jax.Array]:
        """See `ed_layers.projections.dot.Together`."""
        return products(x, [w.numbers for w in weights], epilogue=epilogue)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    static: tuple[PrecisionLike, KernelChoice], x: Float[Array, "*rows i"], w: InPanels
) -> jax.Array:
    precision, choice = static
    with choice.restore():
        if not takes_panels(math.prod(x.shape[:-1]), x.dtype):
            return dot(x, w.unpack_panels(), precision=precision)
        rows = x.reshape(-1, x.shape[-1])
        (y,) = w.products(rows, (w,), Epilogue())
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _forward(static: tuple[PrecisionLike, KernelChoice], x: jax.Array, w: InPanels):
    return _product(static, x, w), (x, w)


def _backward(
    static: tuple[PrecisionLike, KernelChoice], saved: tuple[jax.Array, InPanels], d_y: jax.Array
):
    (precision, choice), (x, w) = static, saved
    with choice.restore():
        _, pull = jax.vjp(lambda x: dot(x, w.unpack_panels(), precision=precision), x)
    return *pull(d_y), None


_product.defvjp(_forward, _backward)
