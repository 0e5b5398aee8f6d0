"""Quantized matrices of a served model in the order in which the native library reads them.

Checkpoints and training use plain matrices. `pack` copies the codes of linear layers into panels
once, after a model was loaded.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
from ed_infra.rules import Rules
from flax import nnx

from ed_layers.native.library import on_whole_arrays
from ed_layers.projections.linear import Linear
from ed_layers.quantization.model import QuantParam
from ed_layers.quantization.panels import CodePanels
from ed_layers.quantization.qarray import QArray
from ed_layers.transform import transform

M = TypeVar("M", bound=nnx.Module)


def pack(model: M) -> M:
    """Return a copy of a model with `w8a8` and `w4a8` matrices of linear layers in panels.

    The native library computes the products of a packed model for every number of rows. The copy
    shares the other arrays. Without the native library, or without such matrices, the model itself
    is returned.

    Args:
        model: a model for inference with unrolled layers. A packed model has no checkpoint format.
    """
    layers = [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, Linear)]
    if not on_whole_arrays() or not any(map(_can_be_packed, layers)):
        return model

    def packed(layer: nnx.Module, _: jax.Array) -> nnx.Module:
        layer = cast(Linear, layer)
        if _can_be_packed(layer):
            codes = CodePanels.of(cast(Any, layer.kernel.get_value()))
            axes = layer.kernel.get_metadata().get("axes")
            layer.kernel = cast(Any, QuantParam(cast(Any, codes), axes=axes))
        return layer

    return transform(model, Rules([("", packed)], kind="packing rule"), of=Linear)


def _can_be_packed(layer: Linear) -> bool:
    # Layers with adapters and other subclasses use their matrix in other ways.
    if type(layer) is not Linear or layer.absorbed:
        return False
    value: Any = layer.kernel.get_value()
    return isinstance(value, QArray) and CodePanels.can_be(value)
