"""Conversion of numbers to a `QArray`. Legend: i in features, o out features, n groups along i."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.specs import KEPT_CODES, EasyDeLQuantizationConfig
from jaxtyping import Array, Float

from ed_layers.quantization.formats import ACTIVATIONS_TOO, FORMATS, StorageFormat
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.stored import Scales, pack


def encode(
    x: Float[Array, "*lead i o"],
    name: str,
    group_size: int | None = None,
    *,
    double: bool = False,
    activations: bool = False,
) -> QArray:
    """Quantize a matrix, or a stack of matrices.

    Args:
        x: floating-point matrix.
        name: name of the format.
        group_size: k; None = the default of the format.
        double: whether the scales are quantized, too.
        activations: see `QArray`.

    Raises:
        ConfigError: the group size is not possible.
    """
    group = FORMATS[name].get_group_size(x.shape[-2], group_size, name)
    w = _encode_groups(x, FORMATS[name], group, double)
    return replace(w, format=name, activations=activations, dtype=np.dtype(x.dtype))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _encode_groups(x: jax.Array, form: StorageFormat, group: int, double: bool) -> QArray:
    def one(x: jax.Array) -> QArray:
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-2], -1, group, x.shape[-1])
        codes, scale, zero = form.encode(grouped)
        codes = codes.reshape(x.shape)
        codes = pack(codes) if form.packed else codes
        scale = _quantize_scales(scale.astype(jnp.float32)) if double else scale
        return QArray(codes, scale, zero)

    # `transform` maps over the layers of a stack one at a time, which avoids a copy of the stack.
    return jax.custom_batching.sequential_vmap(one)(x)


def encode_matrix(
    spec: EasyDeLQuantizationConfig,
    matrix: jax.Array,
    *,
    rows: bool = False,
    absorbed: bool = False,
) -> QArray:
    """Convert a matrix to the format of a configuration.

    Args:
        matrix: [.., i, o]; a table [v, d] with `rows`.
        rows: whether lookups read rows, so that groups run along the columns.
        absorbed: whether products without activations also use the matrix; activations are then not
            quantized.
    """
    if spec.dtype in KEPT_CODES:
        raise ConfigError(
            f"{spec.dtype} keeps the codes of a GGUF file and cannot convert numbers: load the "
            "file with quantization_config and apply_quantization=True, or select another format"
        )
    w = encode(
        matrix.mT if rows else matrix,
        ACTIVATIONS_TOO.get(spec.dtype, spec.dtype),
        spec.group_size,
        double=spec.double_quantization,
        activations=spec.quantizes_activations and not absorbed,
    )
    w = with_float_zero(w) if spec.float_zero else w
    return w.transpose() if rows else w


def with_float_zero(w: QArray) -> QArray:
    """Return a matrix whose scales and zeros are float32 numbers, one zero for each scale."""
    zero = jnp.zeros(w.scale.shape, jnp.float32) if w.zero is None else w.zero
    return replace(w, scale=w.scales(), zero=zero.astype(jnp.float32))


#: Number of scales that share a scale, in double quantization.
DOUBLE_BLOCK = 256


def _quantize_scales(scale: Float[Array, "*lead n o"]) -> Scales:
    offset = jnp.mean(scale, axis=(-2, -1), keepdims=True)
    columns = scale.shape[-1]
    block = max(b for b in range(1, min(columns, DOUBLE_BLOCK) + 1) if columns % b == 0)
    residual = (scale - offset).reshape(*scale.shape[:-1], -1, block)
    outer = jnp.max(jnp.abs(residual), axis=-1) * np.float32(1 / 127)
    codes = jnp.round(residual / jnp.where(outer == 0, 1, outer)[..., None])
    return Scales(codes.reshape(scale.shape).astype(jnp.int8), outer, offset)
