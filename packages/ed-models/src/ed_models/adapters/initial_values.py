"""Adapters of PEFT that were trained on changed weights of the base, after loading.

PEFT saves only the trained adapter, and changes the base again when it loads one:

- PiSSA and OLoRA subtract the initial part of W (`ed_models.adapters.decomposition`). Here the base
  stays unchanged. The adapter has twice the rank, and its second half subtracts the initial part.
- LoftQ replaces W by codes (`ed_models.adapters.loftq`), also here. A base of such codes is used as
  it is, if its codes do not depend on the adapter.

Legend: i in features, o out features, r rank.
"""

from __future__ import annotations

import jax
import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.specs import FORMAT_OF_BITS, LoraSpec
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.stored import Scales
from flax import nnx
from jaxtyping import Float

from ed_models.adapters.decomposition import find_largest_directions
from ed_models.adapters.loftq import NF4_BLOCK
from ed_models.adapters.lora import lora_layers
from ed_models.adapters.peft_layout import Matrix, as_slice, find_matrices
from ed_models.adapters.saved_modules import base_state
from ed_models.adapters.values import LayerAdapter
from ed_models.checkpoints.saving import LayerReader, layer_values


def fit_unchanged_base(
    adapter: LayerAdapter, matrix: Matrix, model: nnx.Module, start: str
) -> LayerAdapter:
    """Return an adapter for the unchanged base.

    Raises:
        ConfigError: the weights are quantized, those of experts, or not in this process.
    """
    state = base_state(model)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        raise ConfigError(
            f"the adapter has init_lora_weights: {start!r}, which changes the weights of the base, "
            "and this process does not have these weights: load the adapter onto the model "
            "(load_adapter) and save it (save_pretrained), which writes a plain adapter"
        )
    quantized = _find_codes(state, matrix)
    if quantized or matrix.experts is not None:
        kind = "quantized" if quantized else "those of experts"
        raise ConfigError(
            f"the adapter has init_lora_weights: {start!r}, which changes the weights of the base, "
            f"and the weights of {matrix.name} are {kind}: load the adapter onto a base that is "
            "not quantized, merge it, and quantize the merged model"
        )
    return subtract_initial_part(adapter, matrix, read_matrix(matrix, layer_values(state)), start)


def check_codes(spec: LoraSpec, matrix: Matrix, model: nnx.Module) -> None:
    """Check that an adapter that started with LoftQ fits the codes of a quantized base.

    Raises:
        ConfigError: the adapter needs other codes.
    """
    config = spec.loftq_config
    if config is None:
        return
    name, size = FORMAT_OF_BITS[config.loftq_bits], NF4_BLOCK if config.loftq_bits == 4 else None
    for codes in _find_codes(base_state(model), matrix):
        group_size = codes.shape[-2] if size is None else size
        is_equal = (codes.format, codes.group_size) == (name, group_size)
        if is_equal and not isinstance(codes.scale, Scales) and config.loftq_iter == 1:
            continue
        raise ConfigError(
            f"the adapter was trained over the codes of LoftQ (loftq_bits {config.loftq_bits}, "
            f"loftq_iter {config.loftq_iter}), and {matrix.name} has {codes.format} in groups of "
            f"{codes.group_size}: load it onto the base that is not quantized, whose codes are "
            "then computed. If this base was saved after LoftQ, set init_lora_weights to true in "
            "adapter_config.json"
        )


def check_separate(model: nnx.Module) -> None:
    """Check that the codes of LoftQ are those of PEFT, which reads transformers' matrices.

    Args:
        model: with new adapters.

    Raises:
        ConfigError: transformers stores several of our matrices as one, and codes that are fitted
            more than once depend on the adapter of the whole matrix.
    """
    iterations = {
        name: layer.spec.loftq_config.loftq_iter
        for path, layer in lora_layers(model)
        if layer.spec.loftq_config is not None
        for name in parameter_names.canonical(parameter_names.normalize_parameter_name(path))
    }
    if not iterations or max(iterations.values()) == 1:
        return
    for matrix in find_matrices(model).values():
        names = {piece.ours for piece in matrix.pieces}
        if len(names) > 1 and any(name.rpartition(".")[0] in iterations for name in names):
            raise ConfigError(
                f"transformers stores {', '.join(sorted(names))} as one matrix ({matrix.name}), "
                "and PEFT would fit its codes to one adapter: set loftq_iter to 1, with which the "
                "codes do not depend on the adapter"
            )


def _find_codes(state: nnx.State, matrix: Matrix) -> list[QArray]:
    """Return the quantized matrices that a matrix of transformers' model consists of."""
    names = {piece.ours for piece in matrix.pieces}
    return [
        variable.get_value()
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable.get_value(), QArray)
        and not names.isdisjoint(parameter_names.canonical(path))
    ]


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
