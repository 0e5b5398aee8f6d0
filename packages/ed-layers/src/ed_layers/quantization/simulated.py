"""`Simulated`: a trained matrix that products read in a quantized format.

Rounding has no slope, so the gradient ignores the rounding (straight-through, Bengio et al. 2013).
Legend: i in features, o out features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.specs import EasyDeLQuantizationConfig
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.projections.matmul import matmul
from ed_layers.quantization.encoding import encode_matrix
from ed_layers.quantization.qarray import QArray, quantize_activations


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Simulated:
    """A matrix [.., i, o], or a table [v, d], and the format in which products read it.

    Attributes:
        value: the matrix. `ed_infra.parameter_names` omits the field name from paths, so the
            parameter keeps its name.
        spec: the format.
        absorbed: see `ed_layers.projections.linear.Linear`.
        axis: axis of the groups: -2; -1 in a table.
    """

    value: jax.Array
    spec: EasyDeLQuantizationConfig = field(metadata={"static": True})
    absorbed: bool = field(default=False, metadata={"static": True})
    axis: int = field(default=-2, metadata={"static": True})

    #: Whether the matrix has a gradient.
    learns = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return self.value.ndim

    @property
    def dtype(self) -> np.dtype:
        """dtype of the matrix."""
        return np.dtype(self.value.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the matrix in bytes."""
        return self.value.nbytes

    @property
    def pieces(self) -> tuple[int, ...]:
        """See `QArray.pieces`."""
        return jax.eval_shape(self.quantize).pieces

    @property
    def T(self) -> Simulated:
        """The transpose."""
        return replace(self, value=jnp.swapaxes(self.value, -1, -2), axis=-3 - self.axis)

    def quantize(self) -> QArray:
        """Return the matrix in its format."""
        value = jax.lax.stop_gradient(self.value)
        return encode_matrix(self.spec, value, rows=self.axis == -1, absorbed=self.absorbed)

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the values that products read, in `dtype`; default: the dtype of the matrix."""
        seen = straight_through(self.value, self.quantize().dense())
        return seen.astype(self.dtype if dtype is None else dtype)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return `dense(dtype)`."""
        return self.dense(dtype)

    def take(self, rows: Int[Array, "*rows"]) -> Float[Array, "*rows o"]:
        """Return rows of a table."""
        return jnp.take(self.dense(), rows, axis=-2)

    def product(self, x: Float[Array, "*rows i"], *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        product = partial(matmul, precision=precision)
        return _multiply_with_remat(product, self, x)

    def grouped_product(
        self,
        rows: Float[Array, "r i"],
        counts: Int[Array, " e"],
        *,
        precision: PrecisionLike = None,
    ) -> Float[Array, "r o"]:
        """Return `jax.lax.ragged_dot` with a stack [e, i, o]."""
        product = partial(jax.lax.ragged_dot, group_sizes=counts, precision=precision)
        return _multiply_with_remat(product, self, rows)

    def other_side(self, x: Float[Array, "*rows i"]) -> Float[Array, "*rows i"]:
        """Return activations as products read them: in 8 bits, if the format quantizes
        activations."""
        if not self.spec.quantizes_activations or self.absorbed:
            return x
        numbers, scale = quantize_activations(x, jax.eval_shape(self.quantize).groups)
        return straight_through(x, (numbers * scale[..., None]).reshape(x.shape).astype(x.dtype))


def _multiply_with_remat(
    product: Callable[..., jax.Array], w: Simulated, x: jax.Array
) -> jax.Array:
    """Return a product whose backward pass rounds again, so that no rounded copy of the model is
    stored."""
    seen = jax.checkpoint(lambda w, x: product(w.other_side(x), w.dense(x.dtype)))
    return seen(w, x)


@jax.custom_jvp
def straight_through(x: jax.Array, seen: jax.Array) -> jax.Array:
    """Return `seen`, with the gradient of `x`."""
    return seen


@straight_through.defjvp
def _tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return primals[1], tangents[0]
