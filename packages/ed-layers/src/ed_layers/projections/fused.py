"""Several projections of one input, or a projection and its activation, in one call of the native
library if it supports them. Otherwise, the layers are called one by one.

Legend: i in features, f out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from ed_layers.context import Ctx
from ed_layers.projections.combined import combined
from ed_layers.projections.linear import Linear


def project(
    layers: Sequence[Linear], x: Float[Array, "*rows i"], ctx: Ctx | None = None
) -> list[jax.Array]:
    """Return `[layer(x, ctx) for layer in layers]`."""
    found = of_layers(layers, x)
    return [layer(x, ctx) for layer in layers] if found is None else found


def project_activated(
    layer: Linear, act: str, x: Float[Array, "*rows i"], name: str
) -> Float[Array, "*rows f"] | None:
    """Return `act(layer(x))`; None if the native library does not support this product.

    Args:
        act: Hugging Face's name of the activation.
        name: name of the projection for remat policies.
    """
    found = of_layers((layer,), x, act=act, names=(name,))
    return None if found is None else found[0]


def project_gated(
    gate: Linear, up: Linear, act: str, x: Float[Array, "*rows i"], names: tuple[str, str]
) -> Float[Array, "*rows f"] | None:
    """Return `act(gate(x)) * up(x)`; None if the native library does not support this product.

    Args:
        act: Hugging Face's name of the activation.
        names: names of the two projections for remat policies.
    """
    found = of_layers((gate, up), x, act=act, gated=True, names=names)
    return None if found is None else found[0]


def of_layers(
    layers: Sequence[Linear],
    x: Float[Array, "*rows i"],
    *,
    act: str | None = None,
    gated: bool = False,
    names: tuple[str, ...] = (),
) -> list[jax.Array] | None:
    """Return `combined` for the matrices and biases of layers."""
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
    return combined(
        x.astype(first.dtype),
        [layer.weight for layer in layers],
        biases,
        act=act,
        gated=gated,
        names=names,
        precision=first.precision,
    )
