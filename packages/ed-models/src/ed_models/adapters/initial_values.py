"""Adapters whose initial values PEFT subtracts from the weights of the base (PiSSA, OLoRA).

The training starts with an adapter that is a part of each matrix W, and with a base without this
part. PEFT saves only the trained adapter, and subtracts the initial part again when it loads one.
The initial parts are projections of W:

- PiSSA (Meng et al. 2024): onto the singular vectors of the r largest singular values
- OLoRA (Büyükakyüz 2024): onto the first r columns of W as torch stores it, times the scale

Here the base stays unchanged. The adapter has twice the rank, and its second half subtracts the
initial part.

Legend: i in features, o out features, r rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from ed_models.adapters.peft_layout import Matrix, as_slice
from ed_models.adapters.values import LayerAdapter
from ed_models.checkpoints.saving import LayerReader


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
    width = part_a.shape[1]
    spec = replace(adapter.spec, rank=rank + width)
    spec = replace(spec, alpha=scale * (spec.rank**0.5 if spec.rslora else spec.rank))
    a = np.concatenate([adapter.a, part_a.astype(np.float32)], axis=1)
    b = np.concatenate([adapter.b, -part_b.astype(np.float32)], axis=0)
    return LayerAdapter(spec, a, b, adapter.magnitude)


def find_largest_directions(
    weight: Float[np.ndarray, "o i"], rank: int
) -> Float[np.ndarray, "o r"]:
    """Return the left singular vectors of the largest singular values.

    The eigenvectors of the smaller Gram matrix take less time than all singular vectors.
    """
    outputs, inputs = weight.shape
    if outputs <= inputs:
        return np.linalg.eigh(weight @ weight.T)[1][:, -rank:]
    directions = weight @ np.linalg.eigh(weight.T @ weight)[1][:, -rank:]
    return np.linalg.qr(directions)[0]


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
