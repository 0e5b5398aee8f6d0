"""Projections and what follows them, in one call of the native library if it supports them.

A call computes several projections of one input, adds their biases, and applies an activation. A
call costs some microseconds, and threads share small matrices unevenly: a decoding step of a small
model spends a quarter of its time on this. In prompts, biases and activations of separate calls
would read and write the results of products again. Otherwise, the layers are called one by one.

Legend: i in features, f out features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ed_layers import fixed_order, native
from ed_layers.activations import activation
from ed_layers.context import Ctx
from ed_layers.projections.linear import Linear, Weight, dot, with_bias

if TYPE_CHECKING:  # the library is loaded at the first product
    from ed_layers.native.products import Finish


class Combination(NamedTuple):
    """How the projections of a call become its results; static.

    Attributes:
        act: Hugging Face's name of an activation; None = the results are the projections.
        gated: whether the result is `act(first) * second`.
        names: names of the projections for remat policies; empty = no names.
        precision: precision of the products outside of the library.
        choice: choice of kernels.
    """

    act: str | None
    gated: bool
    names: tuple[str, ...]
    precision: jax.lax.PrecisionLike
    choice: native.KernelChoice

    def finish(self, biases: tuple[jax.Array, ...]) -> Finish:
        """Return what follows the products in a call of the library."""
        return native.products.Finish(biases, self.act, self.gated)

    def of(self, projected: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results of projections, computed by XLA."""
        if self.act is None:
            return [*projected]
        found = [activation(self.act)(projected[0]), *projected[1:]]
        return [found[0] * found[1]] if self.gated else found


#: Biases of projections: one for each, or none.
Biases = tuple[jax.Array, ...]


def project(
    layers: Sequence[Linear], x: Float[Array, "*rows i"], ctx: Ctx | None = None
) -> list[jax.Array]:
    """Return `[layer(x, ctx) for layer in layers]`."""
    found = combined(layers, x)
    return [layer(x, ctx) for layer in layers] if found is None else found


def project_activated(
    layer: Linear, act: str, x: Float[Array, "*rows i"], name: str
) -> Float[Array, "*rows f"] | None:
    """Return `act(layer(x))`; None if the native library does not support this product.

    Args:
        act: Hugging Face's name of the activation.
        name: name of the projection for remat policies.
    """
    found = combined((layer,), x, act=act, names=(name,))
    return None if found is None else found[0]


def project_gated(
    gate: Linear, up: Linear, act: str, x: Float[Array, "*rows i"], names: tuple[str, str]
) -> Float[Array, "*rows f"] | None:
    """Return `act(gate(x)) * up(x)`; None if the native library does not support this product.

    Args:
        act: Hugging Face's name of the activation.
        names: names of the two projections for remat policies.
    """
    found = combined((gate, up), x, act=act, gated=True, names=names)
    return None if found is None else found[0]


def combined(
    layers: Sequence[Linear],
    x: Float[Array, "*rows i"],
    *,
    act: str | None = None,
    gated: bool = False,
    names: tuple[str, ...] = (),
) -> list[jax.Array] | None:
    """Return the results of a call of the library; None if the library does not support it.

    Args:
        layers: projections of x; either all have a bias, or none.
        act, gated, names: see `Combination`.
    """
    weights = weights_of(layers, x)
    if weights is None or not (act is None or act in native.products.ACTS):
        return None
    biased, dtype = {layer.use_bias for layer in layers}, layers[0].dtype
    if len(biased) > 1 and act is not None:
        return None
    biases = tuple(layer.bias.get_value().astype(dtype) for layer in layers if layer.use_bias)
    choice = native.KernelChoice.present()
    static = Combination(act, gated, names, layers[0].precision, choice)
    if len(biased) > 1:
        found: Any = multiply(static, x.astype(dtype), weights, ())
        return [with_bias(layer, y) for layer, y in zip(layers, found, strict=True)]
    found = multiply(static, x.astype(dtype), weights, biases)
    return found


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
    from ed_layers.quantization.panels import CodePanels
    from ed_layers.quantization.qarray import QArray

    if all(isinstance(w, CodePanels) for w in weights):
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
    static: Combination, x: Float[Array, "*rows i"], weights: tuple[Weight, ...], biases: Biases
) -> list[jax.Array]:
    """Return the results of the products with each matrix."""
    with static.choice.again():
        return jax.lax.platform_dependent(
            x,
            weights,
            biases,
            cpu=partial(by_library, static),
            default=partial(one_by_one, static),
        )


def by_library(
    static: Combination, x: jax.Array, weights: tuple[Weight, ...], biases: Biases
) -> list[jax.Array]:
    """Return the results, computed in one call of the native library."""
    from ed_layers.quantization.panels import CodePanels
    from ed_layers.quantization.qarray import QArray, codes_of

    rows, finish = x.reshape(-1, x.shape[-1]), static.finish(biases)
    coded = [w for w in weights if isinstance(w, QArray)]
    codes = [w.matrix for w in weights if isinstance(w, CodePanels)]
    if coded or codes:
        whole = bool(codes) or coded[0].activations
        codes = codes or [codes_of(w) for w in coded]
        found = native.products.products_of_codes(rows, codes, whole=whole, finish=finish)
    else:
        plain = [w for w in weights if isinstance(w, jax.Array)]
        found = native.products.products(rows, plain, finish=finish)
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in found]


def one_by_one(
    static: Combination, x: jax.Array, weights: tuple[Weight, ...], biases: Biases
) -> list[jax.Array]:
    """Return the results, computed one by one."""
    found = [dot(x, w, precision=static.precision) for w in weights]
    if biases:
        found = [y + bias for y, bias in zip(found, biases, strict=True)]
    return static.of(found)


def multiply_forward(
    static: Combination, x: jax.Array, weights: tuple[Weight, ...], biases: Biases
):
    if static.act is None or fixed_order.active():
        return multiply(static, x, weights, biases), (x, weights, biases, None)
    # The backward pass of an activation reads the projections.
    projected: Any = multiply(static._replace(act=None, gated=False), x, weights, biases)
    projected = [checkpoint_name(y, n) for y, n in zip(projected, static.names, strict=True)]
    return static.of(projected), (x, weights, biases, projected)


def multiply_backward(
    static: Combination,
    saved: tuple[jax.Array, tuple[Weight, ...], Biases, list[jax.Array] | None],
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
    _, pull = jax.vjp(partial(one_by_one, static), x, weights, biases)
    return pull(d_found)


multiply.defvjp(multiply_forward, multiply_backward)
