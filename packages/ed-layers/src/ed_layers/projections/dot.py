"""Products with weights: every product of a layer goes through `dot`.

`combine_products` computes several products and the operations after them in one native call.

In prompts, separate operations after a product would read and write its result again; in decoding,
each call costs some microseconds.

Legend: n rows, i in features, o out features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers import native
from ed_layers.activations import activation
from ed_layers.projections.matmul import gradients_of_matrices, matmul

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


class Combination(NamedTuple):
    """How the projections of a call become its results; static.

    Attributes:
        act: Hugging Face's name of an activation; None = the results are the projections.
        gated: whether the result is `act(first) * second`.
        names: names of the projections for remat policies; empty = no names.
        precision: of XLA's products; "high" also permits native products of parts
            (`native.split`).
        choice: choice of kernels.
    """

    act: str | None
    gated: bool
    names: tuple[str, ...]
    precision: jax.lax.PrecisionLike
    choice: native.KernelChoice

    def epilogue(self, biases: tuple[jax.Array, ...]) -> Epilogue:
        """Return what follows the products in a call of the library."""
        return native.products.Epilogue(biases, self.act, self.gated)

    def runs_on_gpu(self, x: jax.Array, weights: Sequence[Weight]) -> bool:
        """Return whether a Triton kernel computes one result with its activation."""
        if not self.choice.on_one_gpu:
            return False
        from ed_layers.projections import few_rows_gpu

        is_one = self.act in few_rows_gpu.TRITON_ACTS and (self.gated or len(weights) == 1)
        rows = math.prod(x.shape[:-1])
        return is_one and few_rows_gpu.supports_few_rows(self.choice, rows, x.dtype, weights)

    def of(self, projected: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results of projections, computed by XLA."""
        if self.act is None:
            return [*projected]
        results = [activation(self.act)(projected[0]), *projected[1:]]
        return [results[0] * results[1]] if self.gated else results


def combine_products(
    x: Float[Array, "*rows i"],
    weights: Sequence[Weight],
    biases: Sequence[jax.Array] = (),
    *,
    act: str | None = None,
    gated: bool = False,
    names: tuple[str, ...] = (),
    precision: jax.lax.PrecisionLike = None,
) -> list[jax.Array] | None:
    """Return the results of one call of a library or kernel; None if neither supports the call.

    Args:
        weights: matrices [i, o].
        biases: [o] for each matrix in the dtype of x, or empty.
        act, gated, names, precision: see `Combination`.
    """
    choice = native.KernelChoice.get_current()
    static = Combination(act, gated, names, precision, choice)
    by_gpu = static.runs_on_gpu(x, weights)
    if not by_gpu and (not fits(x, weights) or not (act is None or act in native.products.ACTS)):
        return None
    native.KernelChoice.note("products", static, x, weights, biases)
    return multiply(static, x, tuple(weights), tuple(biases))


def fits(x: jax.Array, weights: Sequence[Weight]) -> bool:
    """Return whether the library multiplies x by all matrices in one call."""
    rows, first = math.prod(x.shape[:-1]), weights[0]
    if all(isinstance(w, jax.Array) and native.products.takes(rows, x.dtype, w) for w in weights):
        return True
    same = all(type(w) is type(first) for w in weights)
    return same and isinstance(first, Together) and first.fit(weights, rows, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    static: Combination,
    x: Float[Array, "*rows i"],
    weights: tuple[Weight, ...],
    biases: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Return the results of the products with each matrix."""
    with static.choice.restore():
        if static.runs_on_gpu(x, weights):
            from ed_layers.projections import few_rows_gpu

            matrices = cast("tuple[jax.Array, ...]", weights)
            return [few_rows_gpu.multiply_few_rows(x, matrices, biases, act=static.act)]
        if static.choice.on_one_gpu:
            return one_by_one(static, x, weights, biases)
        return jax.lax.platform_dependent(
            x,
            weights,
            biases,
            cpu=partial(by_library, static),
            default=partial(one_by_one, static),
        )


def by_library(
    static: Combination, x: jax.Array, weights: tuple[Weight, ...], biases: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Return the results, computed in one call of the native library."""
    rows, epilogue, first = x.reshape(-1, x.shape[-1]), static.epilogue(biases), weights[0]
    if isinstance(first, Together):
        results = first.products(rows, weights, epilogue)
    else:
        fastest = partial(native.products.fastest, rows=rows.shape[0], dtype=rows.dtype)
        arrays = [fastest(w) for w in weights if isinstance(w, jax.Array)]
        results = native.products.products(
            rows, arrays, epilogue=epilogue, precision=static.precision
        )
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in results]


def one_by_one(
    static: Combination, x: jax.Array, weights: tuple[Weight, ...], biases: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Return the results, computed one by one."""
    results = [dot(x, w, precision=static.precision) for w in weights]
    if biases:
        results = [y + bias for y, bias in zip(results, biases, strict=True)]
    return static.of(results)


def multiply_forward(
    static: Combination, x: jax.Array, weights: tuple[Weight, ...], biases: tuple[jax.Array, ...]
):
    if static.act is None:
        return multiply(static, x, weights, biases), (x, weights, biases, None)
    # The backward pass of an activation reads the projections.
    projected: Any = multiply(static._replace(act=None, gated=False), x, weights, biases)
    projected = [checkpoint_name(y, n) for y, n in zip(projected, static.names, strict=True)]
    saved = x, weights, biases, projected
    if static.choice.ordered is None:
        return static.of(projected), saved
    # The library applies the activation before it rounds, so the bits of a forward pass without
    # gradients need the call of that pass.
    return multiply(static, x, weights, biases), saved


def multiply_backward(
    static: Combination,
    saved: tuple[jax.Array, tuple[Weight, ...], tuple[jax.Array, ...], list[jax.Array] | None],
    d_found: list[jax.Array],
):
    x, weights, biases, projected = saved
    if projected is not None:
        # The barrier prevents the compiler from keeping further values of the forward pass.
        _, pull = jax.vjp(static.of, jax.lax.optimization_barrier(projected))
        (d_found,) = pull(d_found)
        static = static._replace(act=None, gated=False)
    if not isinstance(weights[0], jax.Array):  # codes and panels have no gradient
        _, pull = jax.vjp(lambda x, b: one_by_one(static, x, weights, b), x, biases)
        d_x, d_biases = pull(d_found)
        return d_x, None, d_biases
    with static.choice.restore():
        matrices = cast("tuple[jax.Array, ...]", weights)
        d_weights = gradients_of_matrices(x, d_found, static.precision)
        d_x = [
            matmul(d_y, w, transposed=True, precision=static.precision)
            for d_y, w in zip(d_found, matrices, strict=True)
        ]
    d_biases = [d_y.sum(range(d_y.ndim - 1)) for d_y in d_found] if biases else []
    return (
        sum(d_x[1:], d_x[0]),
        tuple(d_w.astype(w.dtype) for d_w, w in zip(d_weights, matrices, strict=True)),
        tuple(d_biases),
    )


multiply.defvjp(multiply_forward, multiply_backward)
