"""Adapters of PEFT that were trained on changed weights of the base (PiSSA, OLoRA), after loading.

PEFT saves only the trained adapter, and subtracts the initial part of W again when it loads one
(`ed_models.adapters.decomposition`). Here the base stays unchanged. The adapter has twice the rank,
and its second half subtracts the initial part.

Legend: i in features, o out features, r rank.
"""

from __future__ import annotations

import jax
import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_layers.quantization.qarray import QArray
from flax import nnx
from jaxtyping import Float

from ed_models.adapters.decomposition import find_largest_directions
from ed_models.adapters.peft_layout import Matrix, as_slice
from ed_models.adapters.saved_modules import base_state
from ed_models.adapters.values import LayerAdapter
from ed_models.checkpoints.saving import LayerReader, layer_values


def fit_unchanged_base(
    adapter: LayerAdapter, matrix: Matrix, model: nnx.Module, start: str
) -> LayerAdapter:
    """Return an adapter for the unchanged base; of a model without values, the adapter itself."""
    state = base_state(model)
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return adapter
    names = {piece.ours for piece in matrix.pieces}
    quantized = [
        name
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable.get_value(), QArray)
        for name in parameter_names.canonical(path)
        if name in names
    ]
    if quantized or matrix.experts is not None:
        kind = "quantized" if quantized else "those of experts"
        raise ConfigError(
            f"the adapter has init_lora_weights: {start!r}, which changes the weights of the base, "
            f"and the weights of {matrix.name} are {kind}: load the adapter onto a base that is "
            "not quantized, merge it, and quantize the merged model"
        )
    return subtract_initial_part(adapter, matrix, read_matrix(matrix, layer_values(state)), start)


def subtract_initial_part(
    adapter: LayerAdapter, matrix: Matrix, weight: Float[np.ndarray, "x y"], start: str
) -> LayerAdapter:
    """Return an adapter for the unchanged base.

    Args:
        adapter: the trained adapter of the matrix, with a [i, r] and b [r, o].
        matrix: the matrix of transformers' model.
        weight: its values in the layout of transformers.
        start: "pissa" or "olora".
    """
    rank, scale = adapter.spec.rank, adapter.spec.scale
    has_inputs_first = matrix.pieces[0].perm == (0, 1)  # Conv1D stores [i, o], others [o, i]
    stored = weight.astype(np.float64)
    if start == "olora":
        basis = np.linalg.qr(stored[:, :rank])[0]
    else:
        stored = stored.T if has_inputs_first else stored
        basis = find_largest_directions(stored, rank)
    # The initial adapter of PiSSA is divided by its scale, that of OLoRA is not.
    part_a, part_b = basis, (basis.T @ stored) / (scale if start == "pissa" else 1.0)
    if start == "pissa" or not has_inputs_first:  # [o, r] and [r, i]
        part_a, part_b = part_b.T, part_a.T
    return adapter.subtract_part(part_a, part_b)


def read_matrix(matrix: Matrix, values: LayerReader) -> Float[np.ndarray, "x y"]:
    """Return the values of a matrix of transformers' model, float32.

    Args:
        matrix: a matrix of one layer, not of experts.
        values: (canonical name, leading positions) -> values on the host.
    """
    weight = np.zeros(matrix.shape, np.float32)
    for piece in matrix.pieces:
        block = np.asarray(values(piece.ours, ()), np.float32)
        block = block[tuple(map(as_slice, piece.our_region))].transpose(np.argsort(piece.perm))
        weight[tuple(map(as_slice, piece.hf_region))] = block
    return weight
