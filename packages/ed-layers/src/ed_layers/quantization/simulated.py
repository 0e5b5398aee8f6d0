"""`Simulated`: a matrix that learns as it is, and multiplies as if it were quantized.

Rounding has no slope, so the gradient passes it as if it were not there (straight-through, Bengio
et al. 2013). Legend: i in features, o out features.
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
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.quantization.encoding import encoded
from ed_layers.quantization.qarray import QArray, rounded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Simulated:
    """A matrix [.., i, o], or a table [v, d], and the format that products see it in.

    Attributes:
        value: the matrix. `ed_infra.parameter_names` omits the field name from paths, so the
            parameter keeps its name.
        spec: the format.
        absorbed: of `ed_layers.projections.linear.Linear`.
        axis: along which values are in groups: -2; -1 in a table.
    """

    value: jax.Array
    spec: EasyDeLQuantizationConfig = field(metadata={"static": True})
    absorbed: bool = field(default=False, metadata={"static": True})
    axis: int = field(default=-2, metadata={"static": True})

    #: Whether a gradient of the matrix is wanted.
    learns = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.value.ndim

    @property
    def dtype(self) -> np.dtype:
        """Of the matrix."""
        return np.dtype(self.value.dtype)

    @property
    def nbytes(self) -> int:
        """Of the matrix."""
        return self.value.nbytes

    @property
    def pieces(self) -> tuple[int, ...]:
        """As `QArray.pieces`."""
        return jax.eval_shape(self.quantized).pieces

    @property
    def T(self) -> Simulated:
        """The transpose."""
        return replace(self, value=jnp.swapaxes(self.value, -1, -2), axis=-3 - self.axis)

    def quantized(self) -> QArray:
        """The matrix in its format."""
        value = jax.lax.stop_gradient(self.value)
        return encoded(self.spec, value, rows=self.axis == -1, absorbed=self.absorbed)

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """The values that products see, in `dtype`; default: that of the matrix."""
        seen = straight_through(self.value, self.quantized().dense())
        return seen.astype(self.dtype if dtype is None else dtype)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """As `dense`."""
        return self.dense(dtype)

    def take(self, rows: Int[Array, "*rows"]) -> Float[Array, "*rows o"]:
        """Rows of a table."""
        return jnp.take(self.dense(), rows, axis=-2)

    def product(self, x: Float[Array, "*rows i"], *, precision: Any = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        product = partial(jnp.matmul, precision=precision)
        return _again(product, self, x)

    def grouped_product(
        self, rows: Float[Array, "r i"], counts: Int[Array, " e"], *, precision: Any = None
    ) -> Float[Array, "r o"]:
        """As `jax.lax.ragged_dot` of a stack [e, i, o]."""
        product = partial(jax.lax.ragged_dot, group_sizes=counts, precision=precision)
        return _again(product, self, rows)

    def other_side(self, x: Float[Array, "*rows i"]) -> Float[Array, "*rows i"]:
        """What a product sees of activations: their 8 bits, where the format has them."""
        if not self.spec.quantizes_activations or self.absorbed:
            return x
        numbers, scale = rounded(x, jax.eval_shape(self.quantized).groups)
        return straight_through(x, (numbers * scale[..., None]).reshape(x.shape).astype(x.dtype))


def _again(product: Callable[..., jax.Array], w: Simulated, x: jax.Array) -> jax.Array:
    """A product whose backward pass rounds again, so that no rounded copy of the model is kept."""
    seen = jax.checkpoint(lambda w, x: product(w.other_side(x), w.dense(x.dtype)))
    return seen(w, x)


@jax.custom_jvp
def straight_through(x: jax.Array, seen: jax.Array) -> jax.Array:
    """`seen`, with the gradient of `x`."""
    return seen


@straight_through.defjvp
def _tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return primals[1], tangents[0]
