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
from ed_layers.projections.embed import Embed
from ed_layers.projections.linear import Linear
from ed_layers.projections.panels import Panels
from ed_layers.quantization.panels import CodePanels, TablePanels
from ed_layers.quantization.qarray import QArray
from ed_layers.transform import transform

M = TypeVar("M", bound=nnx.Module)


def pack(model: M, *, numbers: bool = True) -> M:
    """Return a copy of a model with matrices of linear layers in panels: numbers, and codes of
    `w8a8` and `w4a8`; and with embeddings of such codes, which a tied head also reads.

    The native library computes the products of a packed model for every number of rows, with the
    same bits. The copy shares the other arrays. Without the native library, or without such
    matrices, the model itself is returned.

    Args:
        model: a model for inference with unrolled layers. A packed model has no checkpoint format.
        numbers: whether matrices of numbers are packed; see `memory_for_numbers`.
    """
    if not on_whole_arrays():
        return model
    if not any(_form(layer, numbers) for layer in _layers(model)):
        return model

    def pack_layer(layer: nnx.Module, _: jax.Array) -> nnx.Module:
        form, variable = _form(layer, numbers), _matrix(layer)
        if form is not None:
            new = type(variable)(
                form.of(variable.get_value()), axes=variable.get_metadata().get("axes")
            )
            setattr(layer, "kernel" if isinstance(layer, Linear) else "embedding", new)
        return layer

    return transform(model, Rules([("", pack_layer)], kind="packing rule"), of=(Linear, Embed))


def memory_for_numbers(model: nnx.Module) -> bool:
    """Return whether half of the available memory can contain the packed matrices of numbers of a
    model: the owner of the model may keep the plain ones."""
    numbers = [_matrix(layer) for layer in _layers(model) if _form(layer, numbers=True) is Panels]
    return sum(variable.get_value().nbytes for variable in numbers) <= available_bytes() // 2


def _layers(model: nnx.Module) -> list[Linear | Embed]:
    return [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, (Linear, Embed))]


def _matrix(layer: nnx.Module) -> nnx.Param:
    return layer.kernel if isinstance(layer, Linear) else cast(Embed, layer).embedding


def _form(layer: nnx.Module, numbers: bool) -> Any:
    """Return the class of panels that can contain the matrix of a layer; None = none."""
    w = _matrix(layer).get_value()
    if type(layer) is Embed:
        return TablePanels if isinstance(w, QArray) and TablePanels.can_be(w) else None
    # Layers with adapters and other subclasses use their matrix in other ways.
    if type(layer) is not Linear or layer.absorbed:
        return None
    if isinstance(w, QArray):
        return CodePanels if CodePanels.can_be(w) else None
    # Other products convert the matrix, or read parts of its numbers.
    is_plain_array = (
        isinstance(w, jax.Array) and w.dtype == layer.dtype and layer.precision not in split.HIGH
    )
    return Panels if numbers and is_plain_array and Panels.can_be(w) else None
