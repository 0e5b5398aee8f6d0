"""The parameters of a model in MaxText's layout: the same tables as for reading, backwards."""

from __future__ import annotations

import numpy as np
from ed_infra.errors import CheckpointError, unknown_name
from ed_infra.logging import get_logger, once
from ed_layers.quantization.qarray import QArray
from flax import nnx

from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.maxtext_layout import (
    MAXTEXT,
    MAXTEXT_ROWS,
    ArrayPlace,
    StoredParameter,
    convert_from_tensor,
    list_places,
)
from ed_models.checkpoints.saving import Saved, layer_values

logger = get_logger(__name__)
#: The axis of stacked layers (`param_scan_axis`).
_LAYERS = 1


def build_maxtext_arrays(module: Saved, *, scan_layers: bool = True) -> dict[str, np.ndarray]:
    """Return the parameters of a model by MaxText's names, which are joined by dots.

    All arrays are in host memory. Values that are calculated are float32: queries with the factor
    of the attention, Gemma's norms and embeddings.

    Args:
        module: a model without adapters and without quantized matrices.
        scan_layers: stack the layers, as MaxText's option of this name does.

    Raises:
        ConfigError: MaxText's layout of this family is not known.
        CheckpointError: the model is quantized, or the number of layers does not fit.
    """
    config = module.config
    model_type = config.model_type
    if model_type not in MAXTEXT:
        raise unknown_name("family of MaxText's folders", model_type, MAXTEXT)
    state = nnx.state(module)
    leaves = (variable.get_value() for _, variable in nnx.to_flat_state(state))
    if any(isinstance(leaf, QArray) for leaf in leaves):
        raise CheckpointError(
            "the model is quantized, and MaxText's folders contain plain weights: call "
            "model.dequantize() first"
        )
    weights = weight_map(type(module), state, config)
    read_layer = layer_values(state)
    arrays: dict[str, np.ndarray] = {}
    unused = set(weights.hf_shapes)
    tied = getattr(config, "tie_word_embeddings", False)
    for part, layer, place in list_places(MAXTEXT[model_type], config, stacked=scan_layers):
        if tied and part.hf == "lm_head.weight":
            continue
        names = [part.hf.format(layer=layer, expert=0)]
        if part.is_expert:
            names = _list_experts(part, layer, unused)
        for expert, name in enumerate(names):
            if name not in unused:
                raise CheckpointError(
                    f"this {type(module).__name__} has no tensor {name}, which MaxText's layout of "
                    f"a {model_type} contains: models with a head for tokens are written"
                )
            unused.remove(name)
            values = _fit_rows(weights.save(name, read_layer), part, config.vocab_size)
            values = convert_from_tensor(values, part, config)
            index = (expert,) if part.is_expert else ()
            _fill(arrays, values, place, index, len(names))
    if unused:
        raise CheckpointError(
            f"MaxText's layout of a {model_type} has no place for {len(unused)} tensors of this "
            f"model: {', '.join(sorted(unused)[:5])}"
        )
    return arrays


def _list_experts(part: StoredParameter, layer: int | None, names: set[str]) -> list[str]:
    """Return the tensors of the experts of a layer in the order of their numbers."""
    experts = []
    while (name := part.hf.format(layer=layer, expert=len(experts))) in names:
        experts.append(name)
    return experts or [part.hf.format(layer=layer, expert=0)]


def _fit_rows(values: np.ndarray, part: StoredParameter, vocabulary: int) -> np.ndarray:
    """Return a table with as many rows as MaxText's models of this vocabulary have."""
    rows = MAXTEXT_ROWS.get(vocabulary, vocabulary)
    if not part.has_rows or rows == vocabulary:
        return values
    change = "omitted" if rows < vocabulary else "added as zeros"
    once(logger, f"MaxText's vocabulary has {rows} rows of {vocabulary}: rows are {change}")
    zeros = np.zeros((max(rows - vocabulary, 0), *values.shape[1:]), values.dtype)
    return np.concatenate([values[:rows], zeros])


def _fill(
    arrays: dict[str, np.ndarray],
    values: np.ndarray,
    place: ArrayPlace,
    index: tuple[int, ...],
    experts: int,
) -> None:
    """Write the values of one layer, or of one expert of it, into their array."""
    shape = (experts, *values.shape) if index else values.shape
    if place.entry is not None:
        shape = (*shape[:_LAYERS], place.layers, *shape[_LAYERS:])
    if place.array not in arrays:
        arrays[place.array] = np.empty(shape, values.dtype)
    target = arrays[place.array]
    if place.entry is not None:
        target = target[:, place.entry]
    target[index] = values
