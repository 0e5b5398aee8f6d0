"""Dense projections. Every contraction with a weight goes through `dot`.

Legend: i in features, o out features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from ed_infra.sharding.axes import LogicalAxes
from flax import nnx
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.context import Ctx
from ed_layers.fixed_order import rounded
from ed_layers.projections.matmul import matmul

Initializer = jax.nn.initializers.Initializer


@runtime_checkable
class Product(Protocol):
    """A matrix [i, o] that is not a plain array (quantized, low-rank): a pytree with a product."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        ...

    def product(self, x: jax.Array, *, precision: PrecisionLike = None) -> jax.Array:
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

    def product(self, x: jax.Array, *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        return matmul(x, self.rows, transposed=True, precision=precision)


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


class Linear(nnx.Module):
    """`y = x @ kernel + bias`, with kernel [in, out] (the transpose of torch's weight).

    Args:
        in_features, out_features: sizes.
        axes: logical axes of the kernel, (in, out), as `ed_infra.sharding.partition` names them.
        use_bias: add a bias [out].
        dtype: dtype of the product.
        param_dtype: dtype of the stored parameters.
        kernel_init: initializer of the kernel; the bias starts at zero.

    Attributes:
        absorbed: whether a module uses the matrix apart from this layer's call too; what a product
            makes of its other side (quantized activations) is then left out.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: LogicalAxes,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ):
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, axes=axes)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype), axes=(axes[1],))
        self.use_bias = use_bias
        self.absorbed = False
        self.dtype = dtype
        self.precision = precision

    @property
    def weight(self) -> Weight:
        """The matrix [in, out], as an argument of `dot`."""
        return self.kernel.get_value()

    def __call__(self, x: Float[Array, "*rows i"], ctx: Ctx | None = None):
        """Project [..., in] to [..., out]; `ctx` selects the adapter if adapters are served."""
        if self.use_bias:
            from ed_layers.fused_projections import combined

            if (found := combined((self,), x)) is not None:
                return found[0]
        return with_bias(self, dot(x.astype(self.dtype), self.weight, precision=self.precision))


def with_bias(layer: Linear, y: Float[Array, "*rows o"]) -> Float[Array, "*rows o"]:
    """Return a product plus the layer's bias, if it has a bias."""
    return rounded(y + layer.bias.get_value().astype(layer.dtype)) if layer.use_bias else y


class ExpertLinear(nnx.Module):
    """The linear layers of all experts: kernel [e, in, out], bias [e, out].

    Args:
        experts: e.
        in_features, out_features: sizes.
        axes: logical axes of one kernel, (in, out).
        use_bias: whether the layers have biases, which start at zero.
        param_dtype: dtype of the stored parameters.
        kernel_init: initializer of the kernels.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        axes: LogicalAxes,
        use_bias: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ):
        shape = (experts, in_features, out_features)
        kernel = kernel_init(rngs.params(), shape, param_dtype)
        self.kernel = nnx.Param(kernel, axes=("expert", *axes))
        if use_bias:
            zeros = jnp.zeros((experts, out_features), param_dtype)
            self.bias = nnx.Param(zeros, axes=("expert", axes[1]))

    def variables(self) -> dict[str, nnx.Variable]:
        """The arrays of the experts by name; the first dimension of each is the expert."""
        return {name: v for name, v in vars(self).items() if isinstance(v, nnx.Variable)}

    def arrays(self) -> dict[str, jax.Array]:
        """Return the values of the variables as `ed_layers.moe.blocks.ExpertParams`."""
        return {name: variable.get_value() for name, variable in self.variables().items()}
