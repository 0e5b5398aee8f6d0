"""The contraction with a weight: every product of a layer goes through `dot`.

Legend: i in features, o out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.projections.matmul import matmul

if TYPE_CHECKING:  # the library is loaded at the first product
    from ed_layers.native.products import Epilogue


@runtime_checkable
class Product(Protocol):
    """A matrix [i, o] that is not a plain array (quantized, low-rank): a pytree with a product."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        ...

    def product(self, x: jax.Array, *, precision: jax.lax.PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """The matrix `rows.T`, read without a transpose: an embedding that is also the head.

    Attributes:
        rows: [o, i].
    """

    rows: Float[Array, "o i"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        return self.rows.shape[::-1]

    def product(self, x: jax.Array, *, precision: jax.lax.PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        return matmul(x, self.rows, transposed=True, precision=precision)


@runtime_checkable
class Together(Protocol):
    """A matrix of a type whose matrices the native library multiplies in one call."""

    @staticmethod
    def fit(weights: Sequence[Any], rows: int, dtype: DTypeLike) -> bool:
        """Return whether the library multiplies rows of a dtype by all matrices in one call."""
        ...

    @staticmethod
    def products(
        x: Float[Array, "n i"], weights: Sequence[Any], epilogue: Epilogue
    ) -> list[jax.Array]:
        """Return the results of the call."""
        ...


#: The right operand of a contraction.
Weight = jax.Array | Product


def dot(
    x: Float[Array, "*rows i"],
    w: Weight,
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*rows o"]:
    """Contract the last axis of `x` with the first of `w`; the result has the dtype of `x`."""
    if isinstance(w, Product):
        return w.product(x, precision=precision)
    return matmul(x, w, precision=precision)
