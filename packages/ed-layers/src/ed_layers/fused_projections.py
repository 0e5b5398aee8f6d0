"""Several projections of one input, in one call of the native library if it supports them.

A call costs some microseconds, and threads share small matrices unevenly: a decoding step of a
small model spends a quarter of its time on this. Otherwise, the layers are called one by one.

Legend: i in features, f out features of a gated layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from ed_layers import native
from ed_layers.activations import activation
from ed_layers.context import Ctx
from ed_layers.fixed_order import rounded
from ed_layers.projections.linear import Linear, Weight, dot

if TYPE_CHECKING:  # the library is loaded at the first product
    #: Activation of a gated layer or None, the precision, and the choice of kernels.
    ProductKind = tuple[str | None, PrecisionLike, native.KernelChoice]


def project(
    layers: Sequence[Linear], x: Float[Array, "*rows i"], ctx: Ctx | None = None
) -> list[jax.Array]:
    """Return `[layer(x, ctx) for layer in layers]`."""
    weights = weights_of(layers, x)
    if weights is None:
        return [layer(x, ctx) for layer in layers]
    static = (None, layers[0].precision, native.KernelChoice.present())
    found: Any = multiply(static, x.astype(layers[0].dtype), weights)
    return [with_bias(layer, y) for layer, y in zip(layers, found, strict=True)]


def project_gated(
    gate: Linear, up: Linear, act: str, x: Float[Array, "*rows i"]
) -> Float[Array, "*rows f"] | None:
    """Return `act(gate(x)) * up(x)`; None if the native library does not support this product.

    Args:
        act: Hugging Face's name of the activation.
    """
    weights = weights_of((gate, up), x)
    if weights is None or act not in native.products.ACTS or gate.use_bias or up.use_bias:
        return None
    static = (act, gate.precision, native.KernelChoice.present())
    found: Any = multiply(static, x.astype(gate.dtype), weights)
    return found[0]


def with_bias(layer: Linear, y: Float[Array, "*rows f"]) -> Float[Array, "*rows f"]:
    """Return the product plus the layer's bias, if it has a bias."""
    return rounded(y + layer.bias.get_value().astype(layer.dtype)) if layer.use_bias else y


def weights_of(layers: Sequence[Linear], x: jax.Array) -> tuple[Weight, ...] | None:
    """Return the matrices of layers that the library multiplies in one call; otherwise None."""
    first = layers[0]
    # Layers with adapters compute more than a product.
    if any(
        type(layer) is not Linear
        or (layer.dtype, layer.precision) != (first.dtype, first.precision)
        for layer in layers
    ):
        return None
    weights = tuple(layer.weight for layer in layers)
    rows = math.prod(x.shape[:-1])
    takes = native.products.takes
    if all(isinstance(w, jax.Array) and takes(rows, first.dtype, w) for w in weights):
        return weights
    from ed_layers.projections.panels import Panels
    from ed_layers.quantization.panels import CodePanels
    from ed_layers.quantization.qarray import QArray

    for kind in (Panels, CodePanels):
        if all(isinstance(w, kind) for w in weights):
            return weights if native.products.takes_panels(rows, first.dtype) else None
    coded = [w for w in weights if isinstance(w, QArray) and w.axis == -2]
    if len(coded) < len(weights) or len({w.activations for w in coded}) > 1:
        return None
    whole = coded[0].activations
    if all(native.products.takes_codes(rows, first.dtype, w.codes, whole=whole) for w in coded):
        return weights
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    static: ProductKind, x: Float[Array, "*rows i"], weights: tuple[Weight, ...]
) -> list[jax.Array]:
    """Return the product with each matrix; with an activation, the product of a gated layer."""
    act, precision, choice = static
    with choice.again():
        return jax.lax.platform_dependent(
            x, weights, cpu=partial(by_library, act), default=partial(one_by_one, act, precision)
        )


def by_library(act: str | None, x: jax.Array, weights: tuple[Weight, ...]) -> list[jax.Array]:
    """Return the products, computed in one call of the native library."""
    from ed_layers.projections.panels import Panels
    from ed_layers.quantization.panels import CodePanels
    from ed_layers.quantization.qarray import QArray, codes_of

    rows = x.reshape(-1, x.shape[-1])
    coded = [w for w in weights if isinstance(w, QArray)]
    codes = [w.matrix for w in weights if isinstance(w, CodePanels)]
    if coded or codes:
        whole = bool(codes) or coded[0].activations
        codes = codes or [codes_of(w) for w in coded]
        found = native.products.products_of_codes(rows, codes, whole=whole, act=act)
    else:
        plain = [w.numbers if isinstance(w, Panels) else w for w in weights]
        plain = [w for w in plain if isinstance(w, jax.Array)]
        found = native.products.products(rows, plain, act=act)
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in found]


def one_by_one(
    act: str | None, precision: PrecisionLike, x: jax.Array, weights: tuple[Weight, ...]
) -> list[jax.Array]:
    """Return the products, computed one by one."""
    found = [dot(x, w, precision=precision) for w in weights]
    return found if act is None else [activation(act)(found[0]) * found[1]]


def multiply_forward(static: ProductKind, x: jax.Array, weights: tuple[Weight, ...]):
    return multiply(static, x, weights), (x, weights)


def multiply_backward(
    static: ProductKind, saved: tuple[jax.Array, tuple[Weight, ...]], d_found: list[jax.Array]
):
    (act, precision, _), (x, weights) = static, saved
    if not isinstance(weights[0], jax.Array):  # codes and panels have no gradient
        _, pull = jax.vjp(lambda x: one_by_one(act, precision, x, weights), x)
        return *pull(d_found), None
    _, pull = jax.vjp(partial(one_by_one, act, precision), x, weights)
    return pull(d_found)


multiply.defvjp(multiply_forward, multiply_backward)
