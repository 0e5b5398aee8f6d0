"""Initial values of adapters that are a part of the weights: PiSSA and OLoRA.

The training starts with an adapter A0 B0 that is a part of each matrix W, and computes with the
remaining part W - scale * A0 B0, so the model is unchanged at first:

- PiSSA (Meng et al. 2024): A0 and B0 are the singular vectors of the r largest singular values S,
  times `sqrt(S / scale)`. `pissa_niter_N` finds the vectors by N iterations of a random subspace
  (Halko et al. 2011, algorithm 4.4), which is faster for large matrices.
- OLoRA (Büyükakyüz 2024): A0 B0 are the first r rows of R and columns of Q in the QR decomposition
  of the transposed W, which torch stores.

The matrices equal those of PEFT, except for the signs of singular vectors, which are arbitrary.

Legend: i in features, o out features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from ed_infra.distributed import on_host
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_layers.lora.layers import AdaptedLayer, LoRALinear
from jax.core import Tracer
from jaxtyping import Float

#: Random vectors of `pissa_niter_N`; the product A0 B0 hardly depends on them.
_SEED = 0


def decompose_weights(layers: Iterable[tuple[tuple[Any, ...], AdaptedLayer]]) -> None:
    """Set the initial values of new adapters that are a part of the weights, in place.

    Embeddings have plain initial values, as in PEFT. Traced weights are not decomposed: their
    adapters have shapes only.

    Args:
        layers: storage paths and layers with adapters.

    Raises:
        ConfigError: the weights are quantized.
    """
    for path, layer in layers:
        if not isinstance(layer, LoRALinear) or not layer.spec.subtracts_start:
            continue
        kernel = get_plain_kernel(path, layer)
        if isinstance(kernel, Tracer):
            continue
        pairs = [
            decompose_matrix(on_host(matrix).astype(np.float64), layer.spec)
            for matrix in (kernel if kernel.ndim == 3 else [kernel])
        ]
        for name, matrices in zip(("a", "b"), zip(*pairs, strict=True), strict=True):
            value = np.stack(matrices) if kernel.ndim == 3 else matrices[0]
            for prefix in ("lora_", "lora_initial_"):
                # A training step donates the buffers of A and B, so the initial values need theirs.
                getattr(layer, f"{prefix}{name}").set_value(jax.numpy.array(value))


def get_plain_kernel(path: tuple[Any, ...], layer: LoRALinear) -> jax.Array:
    """Return the weights of a layer with initial values that are computed from them.

    Raises:
        ConfigError: the weights are quantized.
    """
    kernel = layer.kernel.get_value()
    if not isinstance(kernel, jax.Array):
        name = ".".join(map(str, path))
        raise ConfigError(
            f"init_lora_weights {layer.spec.init_lora_weights!r} decomposes the weights, and "
            f"those of {name} are quantized: omit init_lora_weights, or the quantization"
        )
    return kernel


def decompose_matrix(
    weight: Float[np.ndarray, "i o"], spec: LoraSpec
) -> tuple[Float[np.ndarray, "i r"], Float[np.ndarray, "r o"]]:
    """Return the initial A and B of a matrix, float32; zeros where the rank exceeds its size."""
    rank = min(spec.rank, *weight.shape)
    if spec.init_lora_weights == "olora":
        columns, rows = np.linalg.qr(weight.T)
        part_a, part_b = rows[:rank].T, columns[:, :rank].T
    else:
        _, _, iterations = str(spec.init_lora_weights).partition("_niter_")
        if iterations:
            basis = find_subspace(weight, rank, int(iterations))
        else:
            basis = find_largest_directions(weight, rank)
        part_a, part_b = factor_matrix(weight, basis, spec.scale)
    return pad_ranks(part_a, part_b, spec.rank)


def factor_matrix(
    weight: Float[np.ndarray, "i o"], basis: Float[np.ndarray, "i r"], scale: float = 1.0
) -> tuple[Float[np.ndarray, "i r"], Float[np.ndarray, "r o"]]:
    """Return the singular vectors of a matrix in the span of a basis, times the roots of the
    singular values, which are divided by the scale."""
    left, values, right = np.linalg.svd(basis.T @ weight, full_matrices=False)
    roots = np.sqrt(values / scale)
    return basis @ left * roots, roots[:, None] * right


def pad_ranks(
    part_a: Float[np.ndarray, "i n"], part_b: Float[np.ndarray, "n o"], rank: int
) -> tuple[Float[np.ndarray, "i r"], Float[np.ndarray, "r o"]]:
    """Return two factors of the rank, float32; the missing rows and columns are zero."""
    missing_ranks = rank - part_a.shape[1]
    part_a = np.pad(part_a, ((0, 0), (0, missing_ranks)))
    part_b = np.pad(part_b, ((0, missing_ranks), (0, 0)))
    return part_a.astype(np.float32), part_b.astype(np.float32)


def find_largest_directions(
    weight: Float[np.ndarray, "x y"], rank: int
) -> Float[np.ndarray, "x r"]:
    """Return the left singular vectors of the largest singular values, in float64.

    The eigenvectors of the smaller Gram matrix are faster to compute than all singular vectors.
    """
    rows, columns = weight.shape
    if rows <= columns:
        return np.linalg.eigh(weight @ weight.T)[1][:, -rank:]
    directions = weight @ np.linalg.eigh(weight.T @ weight)[1][:, -rank:]
    return np.linalg.qr(directions)[0]


def find_subspace(
    weight: Float[np.ndarray, "x y"], rank: int, iterations: int
) -> Float[np.ndarray, "x r"]:
    """Return a basis near the span of the left singular vectors of the largest singular values."""
    vectors = np.random.default_rng(_SEED).normal(size=(weight.shape[1], rank))
    basis = np.linalg.qr(weight @ vectors)[0]
    for _ in range(iterations):
        basis = np.linalg.qr(weight.T @ basis)[0]
        basis = np.linalg.qr(weight @ basis)[0]
    return basis
