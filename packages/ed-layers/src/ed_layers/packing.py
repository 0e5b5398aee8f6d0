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


def pack(model: M) -> M:
    """Return a copy of a model with float32 and `w8a8` matrices of linear layers in panels.

    The native library computes the products of a packed model for every number of rows. The copy
    shares the other arrays. Without the native library, the model itself is returned.

    Args:
        model: a model for inference with unrolled layers. A packed model has no checkpoint format.
    """
    if not on_whole_arrays() or not any(isinstance(m, Linear) for _, m in nnx.iter_modules(model)):
        return model
    return transform(model, Rules([("", _packed)], kind="packing rule"), of=Linear)


def _packed(module: nnx.Module, _: jax.Array) -> nnx.Module:
    # Layers with adapters and other subclasses use their matrix in other ways.
    if type(module) is not Linear or module.absorbed:
        return module
    value: Any = module.kernel.get_value()
    axes = module.kernel.get_metadata().get("axes")
    if isinstance(value, QArray) and CodePanels.can_be(value):
        module.kernel = cast(Any, QuantParam(CodePanels.of(value), axes=axes))
    elif isinstance(value, jax.Array) and Panels.can_be(value) and module.dtype == jnp.float32:
        module.kernel = cast(Any, nnx.Param(Panels.of(value), axes=axes))
    return module
