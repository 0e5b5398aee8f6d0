"""Matrices of a served model in the order in which the native library reads them.

Checkpoints and training use plain matrices. `pack` copies the matrices of linear layers into
panels once, after a model was loaded.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
from ed_infra.host_memory import available_bytes
from ed_infra.rules import Rules
from flax import nnx

from ed_layers.native import split
from ed_layers.native.library import on_whole_arrays
from ed_layers.projections.linear import Linear
from ed_layers.projections.panels import Panels
from ed_layers.quantization.panels import CodePanels
from ed_layers.quantization.qarray import QArray
from ed_layers.transform import transform

M = TypeVar("M", bound=nnx.Module)


def pack(model: M, *, numbers: bool = True) -> M:
    """Return a copy of a model with matrices of linear layers in panels: numbers, and codes of
    `w8a8` and `w4a8`.

    The native library computes the products of a packed model for every number of rows, with the
    same bits. The copy shares the other arrays. Without the native library, or without such
    matrices, the model itself is returned.

    Args:
        model: a model for inference with unrolled layers. A packed model has no checkpoint format.
        numbers: whether matrices of numbers are packed; see `memory_for_numbers`.
    """
    if not on_whole_arrays():
        return model
    layers = _linear_layers(model)
    numbers = numbers and any(map(_numbers_can_be_packed, layers))
    if not (numbers or any(map(_codes_can_be_packed, layers))):
        return model

    def packed(layer: nnx.Module, _: jax.Array) -> nnx.Module:
        layer = cast(Linear, layer)
        value: Any = layer.kernel.get_value()
        if _codes_can_be_packed(layer):
            value = CodePanels.of(value)
        elif numbers and _numbers_can_be_packed(layer):
            value = Panels.of(value)
        else:
            return layer
        axes = layer.kernel.get_metadata().get("axes")
        layer.kernel = type(layer.kernel)(cast(Any, value), axes=axes)
        return layer

    return transform(model, Rules([("", packed)], kind="packing rule"), of=Linear)


def memory_for_numbers(model: nnx.Module) -> bool:
    """Return whether half of the available memory can contain the packed matrices of numbers of a
    model: the owner of the model may keep the plain ones."""
    packed = [layer.kernel for layer in _linear_layers(model) if _numbers_can_be_packed(layer)]
    return sum(kernel.get_value().nbytes for kernel in packed) <= available_bytes() // 2


def _linear_layers(model: nnx.Module) -> list[Linear]:
    return [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, Linear)]


def _can_be_packed(layer: Linear) -> bool:
    # Layers with adapters and other subclasses use their matrix in other ways.
    return type(layer) is Linear and not layer.absorbed


def _codes_can_be_packed(layer: Linear) -> bool:
    value: Any = layer.kernel.get_value()
    return _can_be_packed(layer) and isinstance(value, QArray) and CodePanels.can_be(value)


def _numbers_can_be_packed(layer: Linear) -> bool:
    # Other products convert the matrix, or read parts of its numbers.
    value: Any = layer.kernel.get_value()
    if not (_can_be_packed(layer) and isinstance(value, jax.Array) and Panels.can_be(value)):
        return False
    return value.dtype == layer.dtype and layer.precision not in split.HIGH
