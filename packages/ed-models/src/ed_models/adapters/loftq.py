"""LoftQ: the base becomes codes, and the adapter starts as a part of their error.

LoftQ (Li et al. 2023, algorithm 1) fits the codes Q and the adapter A B of a matrix W in turn:
`Q = codes(W - A B)` with A B = 0 at first, then A B = the part of W - Q with the r largest singular
values, both factors times the roots of these values. PEFT does not divide by the scale of the
adapter, so `Q + A B` is near W, and the layer computes this sum only with a scale of 1.

The codes are those of PEFT: for 4 bits nf4 with a scale for 64 inputs, for 8 bits int8 of float16
numbers with a scale for each output. PEFT keeps the values of the codes in a plain matrix. Here the
layer has the codes, as over a quantized base (QLoRA).

Legend: i in features, o out features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.distributed import on_host
from ed_infra.errors import ConfigError
from ed_infra.specs import FORMAT_OF_BITS, LoftQConfig, LoraSpec
from ed_layers.lora.layers import AdaptedLayer, LoRALinear
from ed_layers.quantization.encoding import encode
from ed_layers.quantization.model import QuantParam, get_matrix
from ed_layers.quantization.qarray import QArray
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_models.adapters.decomposition import (
    factor_matrix,
    find_largest_directions,
    get_plain_kernel,
    pad_ranks,
)

#: Numbers that share a scale in the nf4 codes of bitsandbytes.
NF4_BLOCK = 64


def start_over_codes(layers: Iterable[tuple[tuple[Any, ...], AdaptedLayer]]) -> None:
    """Replace the weights under new adapters by codes, and set the adapters, in place.

    Args:
        layers: storage paths and layers with adapters; those without LoftQ are unchanged.

    Raises:
        ConfigError: the weights are quantized, or PEFT's blocks are no groups of their inputs.
    """
    for path, layer in layers:
        if not isinstance(layer, LoRALinear):
            continue
        factors = put_codes(path, layer)
        if factors is None:
            continue
        layer.lora_a.set_value(jnp.array(factors[0]))
        layer.lora_b.set_value(jnp.array(factors[1]))
        if layer.spec.dora:
            kernel = layer.kernel.get_value().astype(jnp.float32)
            dense_kernel = np.asarray(kernel) + layer.spec.scale * (factors[0] @ factors[1])
            layer.lora_magnitude.set_value(jnp.array(np.linalg.norm(dense_kernel, axis=-2)))


def put_codes(
    path: tuple[Any, ...], layer: LoRALinear
) -> tuple[Float[np.ndarray, "*layers i r"], Float[np.ndarray, "*layers r o"]] | None:
    """Replace the weights of a layer by LoftQ's codes, in place, and return A and B.

    None for layers without LoftQ, and for traced weights, whose codes have shapes only.

    Raises:
        ConfigError: see `start_over_codes`.
    """
    config = layer.spec.loftq_config
    if config is None:
        return None
    kernel, axes = get_plain_kernel(path, layer), layer.kernel.get_metadata().get("axes")
    name, inputs = get_matrix(layer)[0], kernel.shape[-2]
    if config.loftq_bits == 4 and inputs % NF4_BLOCK:
        raise ConfigError(
            f"{'.'.join(map(str, path))} has {inputs} inputs, and the blocks of {NF4_BLOCK} of "
            "LoftQ's 4-bit codes would contain inputs of several outputs: leave the layer out of "
            "the targets, or set loftq_config: {loftq_bits: 8}"
        )
    if isinstance(kernel, Tracer):
        setattr(layer, name, QuantParam(_encode(kernel, config, kernel.dtype), axes=axes))
        return None
    matrices = kernel if kernel.ndim == 3 else [kernel]
    fits = [fit_codes(on_host(matrix), layer.spec) for matrix in matrices]
    if kernel.ndim == 3:
        codes, a, b = jax.tree.map(lambda *leaves: jnp.stack(leaves), *fits)
    else:
        codes, a, b = fits[0]
    setattr(layer, name, QuantParam(replace(codes, dtype=np.dtype(kernel.dtype)), axes=axes))
    return np.asarray(a), np.asarray(b)


def fit_codes(
    weight: Float[np.ndarray, "i o"], spec: LoraSpec
) -> tuple[QArray, Float[np.ndarray, "i r"], Float[np.ndarray, "r o"]]:
    """Return the codes of a matrix, and the initial A and B, float32."""
    config, weight = spec.loftq_config, weight.astype(np.float32)
    assert config is not None, "the initial values are not those of LoftQ"
    rank = min(spec.rank, *weight.shape)
    remaining_weight = weight
    for _ in range(config.loftq_iter - 1):
        codes = _encode(jnp.asarray(remaining_weight), config, np.float32)
        a, b = _factor_error(weight, codes, rank)
        remaining_weight = (weight - a @ b).astype(np.float32)
    codes = _encode(jnp.asarray(remaining_weight), config, np.float32)
    return codes, *pad_ranks(*_factor_error(weight, codes, rank), spec.rank)


def _factor_error(
    weight: Float[np.ndarray, "i o"], codes: QArray, rank: int
) -> tuple[Float[np.ndarray, "i r"], Float[np.ndarray, "r o"]]:
    """Return the largest part of the error of codes, as two factors in float64."""
    error = weight.astype(np.float64) - np.asarray(codes.dense(jnp.float32), np.float64)
    return factor_matrix(error, find_largest_directions(error, rank))


def _encode(matrix: Float[Array, "*lead i o"], config: LoftQConfig, dtype: DTypeLike) -> QArray:
    """Return the codes of bitsandbytes, which are decoded to `dtype`."""
    name = FORMAT_OF_BITS[config.loftq_bits]
    if name == "int8":  # bitsandbytes reads float16
        matrix = matrix.astype(jnp.float16).astype(jnp.float32)
    codes = encode(matrix, name, NF4_BLOCK if name == "nf4" else None)
    return replace(codes, dtype=np.dtype(dtype))
