"""The embedding and the head in adapter files of models with added tokens.

PEFT writes both tables together with the adapter if the number of tokens differs from that of the
base. A base is resized before it gets such an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import CheckpointError
from ed_layers.quantization.qarray import QArray
from flax import nnx
from safetensors import SafetensorError, safe_open

from ed_models.adapters.saved_modules import base_state, build_weight_map, module_names
from ed_models.adapters.token_rows import (
    TokenModel,
    copy_with_values,
    count_token_rows,
    find_token_axes,
    has_arrays,
)
from ed_models.checkpoints.quantized_tensors import encoded_as
from ed_models.checkpoints.saving import layer_values
from ed_models.checkpoints.weight_map import WeightMap

M = TypeVar("M")
_TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
#: PEFT's name of a layer below an adapter.
INNER = "base_layer"


class TokenTables(NamedTuple):
    """The tables of tokens of a model.

    Attributes:
        weights: the tensors of the model without its adapters.
        names: name of a tensor in an adapter file -> name in a checkpoint.
        axes: name in a checkpoint -> axis of the tokens.
    """

    weights: WeightMap
    names: Mapping[str, str]
    axes: Mapping[str, int]


def find_token_tables(model: TokenModel) -> TokenTables:
    """Return the tables of a model, by the names of an adapter file."""
    weights, tokens = build_weight_map(model), find_token_axes(model)
    parameters = {
        name
        for path, variable in nnx.to_flat_state(base_state(model))
        if isinstance(variable, nnx.Param) or isinstance(variable.get_value(), QArray)
        for name in parameter_names.canonical(path)
    }
    names, axes = {}, {}
    for stored, new in module_names(model, weights).items():
        pieces = weights.by_hf[stored]
        first = pieces[0]
        if first.ours not in tokens or first.ours not in parameters or len(pieces) != 1:
            continue
        module, _, last = new.rpartition(".")
        axes[stored] = first.perm[tokens[first.ours]]
        names |= {f"{PREFIX}{new}": stored, f"{PREFIX}{module}.{INNER}.{last}": stored}
    return TokenTables(weights, names, axes)


def save_token_tables(
    model: TokenModel, adapted: Collection[str], saved: Collection[str]
) -> dict[str, np.ndarray]:
    """Return the tables of a model with added tokens, float32, by the names of an adapter file.

    Args:
        model: with adapters.
        adapted: canonical names of the matrices with adapters.
        saved: canonical names of the parameters that the file contains anyway.
    """
    base = model.base_token_rows
    if base is None or base == count_token_rows(model.config):
        return {}
    tables, read = find_token_tables(model), layer_values(base_state(model))
    tensors = {}
    for name, stored in tables.names.items():
        ours = tables.weights.by_hf[stored][0].ours
        is_inner = f".{INNER}." in name
        if ours not in saved and is_inner == (ours in adapted):
            values = tables.weights.save(stored, read)
            tensors[name] = np.ascontiguousarray(values, np.float32)
    return tensors


def add_token_rows(model: M, directory: str | Path) -> M:
    """Return a model with the number of tokens, and with the tables, of an adapter's base.

    A model without added tokens, or an adapter without tables, is returned unchanged.

    Args:
        model: the base of the adapter; its arrays may be shapes.
        directory: of the adapter.

    Raises:
        ConfigError: rows are added, and the model has adapters.
    """
    base: Any = model
    values = _read_tables(base, Path(directory) / _TENSORS)
    tables = find_token_tables(base) if values else None
    if tables is None:
        return model
    rows = [
        value.shape[axis]
        for stored, value in values.items()
        if (axis := tables.axes[stored]) < value.ndim
    ]
    base = base.resize_token_embeddings(max(rows)) if rows else base
    return model if base.base_token_rows is None else _put_tables(base, values)


def check_token_tables(model: TokenModel, directory: str | Path) -> None:
    """Check that the tables of an adapter file are those of a served model.

    Raises:
        CheckpointError: they differ.
    """
    values = _read_tables(model, Path(directory) / _TENSORS)
    weights, read = build_weight_map(model), layer_values(base_state(model))
    for stored, value in values.items():
        present = weights.save(stored, read)
        if value.shape != present.shape or (value.astype(present.dtype) != present).any():
            raise CheckpointError(
                f"the adapter in {directory} contains the table {stored} {list(value.shape)}, "
                f"which differs from the model's {list(present.shape)}: adapters that are "
                "served together share one embedding. Merge the adapter (`elarge merge`), and "
                "serve the merged model"
            )


def _read_tables(model: TokenModel, path: Path) -> dict[str, np.ndarray]:
    """Return the tables of tokens in an adapter file, by their names in a checkpoint."""
    if not isinstance(getattr(model.config.get_text_config(), "vocab_size", None), int):
        return {}
    try:
        with safe_open(path, "np") as file:
            names = [n for n in file.keys() if ".lora_" not in n]  # noqa: SIM118 - no mapping
            tables = find_token_tables(model).names if names else {}
            return {tables[name]: file.get_tensor(name) for name in names if name in tables}
    except (OSError, SafetensorError):
        return {}  # `read_adapter` names the fault


def _put_tables(model: TokenModel, values: Mapping[str, np.ndarray]) -> Any:
    """Return a copy of a model with other values of its tables."""
    weights = build_weight_map(model)

    def replace(name: str, variable: nnx.Variable) -> Any:
        stored = [p.hf for p in weights.by_ours.get(name, ()) if p.hf in values]
        value = variable.get_value()
        if not stored or isinstance(value, jax.ShapeDtypeStruct):
            return None
        if values[stored[0]].shape != weights.hf_shapes[stored[0]]:
            return None  # `read_adapter` names the fault
        table = np.empty(weights.shapes[name], np.float32)
        window = [range(size) for size in table.shape]
        weights.load(name, window, lambda hf, index: values[hf][index], table, check_finite=True)
        dense = table.astype(value.dtype)
        return encoded_as(jax.numpy.asarray(dense), value) if isinstance(value, QArray) else dense

    copy = copy_with_values(model, replace)
    return copy.shard_model() if has_arrays(copy) else copy
