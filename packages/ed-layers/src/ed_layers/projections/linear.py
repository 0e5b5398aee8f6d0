"""Dense projections, alone and several of one input.

Legend: i in features, o out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from ed_infra.sharding.axes import LogicalAxes
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.context import Ctx
from ed_layers.projections.dot import Weight, combine_products, dot

Initializer = jax.nn.initializers.Initializer


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
        x, w = x.astype(self.dtype), self.weight
        if not self.use_bias:
            return dot(x, w, precision=self.precision)
        bias = self.bias.get_value().astype(self.dtype)
        results = combine_products(x, (w,), (bias,), precision=self.precision)
        return dot(x, w, precision=self.precision) + bias if results is None else results[0]


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


def project(
    layers: Sequence[Linear], x: Float[Array, "*rows i"], ctx: Ctx | None = None
) -> list[jax.Array]:
    """Return `[layer(x, ctx) for layer in layers]`."""
    results = combine_layers(layers, x)
    return [layer(x, ctx) for layer in layers] if results is None else results


def project_activated(
    layers: Sequence[Linear], act: str, x: Float[Array, "*rows i"], names: tuple[str, ...]
) -> Float[Array, "*rows o"] | None:
    """Return `act(layer(x))` of one layer, or `act(gate(x)) * up(x)` of a gate and a layer; None if
    the native library does not support this product.

    Args:
        act: Hugging Face's name of the activation.
        names: names of the projections for remat policies.
    """
    results = combine_layers(layers, x, act=act, gated=len(layers) == 2, names=names)
    return None if results is None else results[0]


def combine_layers(
    layers: Sequence[Linear],
    x: Float[Array, "*rows i"],
    *,
    act: str | None = None,
    gated: bool = False,
    names: tuple[str, ...] = (),
) -> list[jax.Array] | None:
    """Return `combine_products` for the matrices and biases of layers."""
    first = layers[0]
    # Layers with adapters compute more than a product.
    if any(
        type(layer) is not Linear
        or (layer.dtype, layer.precision, layer.use_bias)
        != (first.dtype, first.precision, first.use_bias)
        for layer in layers
    ):
        return None
    biases = [layer.bias.get_value().astype(layer.dtype) for layer in layers if layer.use_bias]
    return combine_products(
        x.astype(first.dtype),
        [layer.weight for layer in layers],
        biases,
        act=act,
        gated=gated,
        names=names,
        precision=first.precision,
    )
