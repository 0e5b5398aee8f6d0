"""Matrices of a served model in the order in which the native library reads them.

Checkpoints and training use plain matrices. `pack` copies the matrices of linear layers into panels
once, after a model was loaded.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from ed_infra.rules import Rules
from flax import nnx

from ed_layers.native.library import on_whole_arrays
from ed_layers.projections.linear import Linear
from ed_layers.projections.panels import Panels
from ed_layers.quantization.model import QuantParam
from ed_layers.quantization.panels import CodePanels
from ed_layers.quantization.qarray import QArray
from ed_layers.transform import transform

M = TypeVar("M", bound=nnx.Module)


def pack(model: M, *, numbers: bool = True) -> M:
    """Return a copy of a model with `w8a8`, `w4a8` and float32 matrices of linear layers in panels.

    The native library computes the products of a packed model for every number of rows. The copy
    shares the other arrays. Without the native library, or without such matrices, the model itself
    is returned.

    Args:
        model: a model for inference with unrolled layers. A packed model has no checkpoint format.
        numbers: whether float32 matrices are copied, too.
    """
    layers = [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, Linear)]
    if not on_whole_arrays() or not any(_panels_of(layer, numbers) for layer in layers):
        return model

    def packed(layer: nnx.Module, _: jax.Array) -> nnx.Module:
        layer = cast(Linear, layer)
        if (panels := _panels_of(layer, numbers)) is not None:
            value: Any = layer.kernel.get_value()
            kind = QuantParam if panels is CodePanels else nnx.Param
            axes = layer.kernel.get_metadata().get("axes")
            layer.kernel = cast(Any, kind(cast(Any, panels.of(value)), axes=axes))
        return layer

    return transform(model, Rules([("", packed)], kind="packing rule"), of=Linear)


def _panels_of(layer: Linear, numbers: bool) -> type[Panels] | type[CodePanels] | None:
    """Return the kind of panels for the matrix of a layer; None = it remains as it is."""
    # Layers with adapters and other subclasses use their matrix in other ways.
    if type(layer) is not Linear or layer.absorbed:
        return None
    value: Any = layer.kernel.get_value()
    if isinstance(value, QArray):
        return CodePanels if CodePanels.can_be(value) else None
    plain = numbers and isinstance(value, jax.Array) and layer.dtype == jnp.float32
    return Panels if plain and Panels.can_be(value) else None
