"""Modules that are trained in full and saved beside adapters (PEFT's `modules_to_save`).

A name selects each module whose name ends with its parts, in this model or in transformers' model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.rules import Rules
from ed_layers.lora.layers import InitialMatrix
from ed_layers.lora.saved_modules import (
    OriginalParam,
    SavedParam,
    get_copies,
    has_copies,
    with_copies,
)
from ed_layers.lora.slots import SlotParam
from ed_layers.transform import Replace, transform
from flax import nnx

from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.rules import renamer

M = TypeVar("M", bound=nnx.Module)
_LISTED = 10


def base_state(model: object) -> nnx.State:
    """Return the parameters of a model without its adapters."""

    def is_base(path: object, variable: nnx.Variable) -> bool:
        if isinstance(variable, SavedParam):
            return True
        adapters = nnx.LoRAParam | SlotParam | OriginalParam | InitialMatrix
        return not isinstance(variable, adapters)

    return nnx.state(model, is_base)


def build_weight_map(model: Any) -> WeightMap:
    """Return the tensors of a model without its adapters."""
    return weight_map(type(model), base_state(model), model.config)


def module_names(model: object, weights: WeightMap) -> dict[str, str]:
    """Return checkpoint tensor -> the name of the parameter in transformers' model."""
    modules = getattr(type(model), "MODULES", None)
    rename = renamer({} if modules is None else modules.names)
    return {name: rename(name) for name in weights.hf_shapes}


def list_modules(model: object, weights: WeightMap) -> list[str]:
    """Return the names of the modules of transformers' model, of layers and of what has layers."""
    names = module_names(model, weights).values()
    return list(dict.fromkeys(module for name in names for module in _prefixes(name)))


def find_parameters(model: object, names: str | Iterable[str]) -> list[str]:
    """Return the canonical names of the parameters of modules.

    Args:
        model: A model of a family.
        names: Names of modules, or the last parts of such names.

    Raises:
        ConfigError: A module does not exist, has a matrix that transformers stores together with
            that of another module, or is an embedding that is also the head.
    """
    weights = build_weight_map(model)
    theirs = module_names(model, weights)
    parameters: dict[str, None] = {}
    for name in (names,) if isinstance(names, str) else names:
        ours = [ours for ours in weights.shapes if _is_inside(ours, name)]
        ours += [
            piece.ours
            for tensor, pieces in weights.by_hf.items()
            if _is_inside(theirs[tensor], name)
            for piece in pieces
        ]
        if not ours:
            raise ConfigError(_unknown(name, [*weights.shapes, *theirs.values()]))
        parameters |= dict.fromkeys(ours)
    _check_whole(weights, parameters)
    _check_untied(model, weights, parameters)
    return list(parameters)


def with_saved_modules(model: M, parameters: Iterable[str]) -> M:
    """Return a copy of a model in which the modules of parameters have trained copies."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    pattern = f"^(?:{'|'.join(map(re.escape, modules))})$"
    rules: Rules[Replace] = Rules([(pattern, with_copies)], kind="module to save")
    return transform(model, rules)


def saved_values(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters that are trained in full, by canonical name, float32."""
    values = {}
    for path, variable in _copies(model):
        value = np.asarray(variable.get_value(), np.float32)
        stacked = parameter_names.is_stacked(path)
        for i, name in enumerate(parameter_names.canonical(path)):
            values[name] = value[i] if stacked else value
    return values


def put_saved_values(model: M, values: Mapping[str, np.ndarray]) -> M:
    """Write values into the trained copies of a model in place, and return the model."""
    for path, variable in _copies(model):
        names = parameter_names.canonical(path)
        if names[0] not in values:
            continue  # the file has no tensor of the parameter: the values of the base stay
        new = [values[name] for name in names]
        stacked = np.stack(new) if parameter_names.is_stacked(path) else new[0]
        variable.set_value(stacked.astype(variable.get_value().dtype))
    return model


def covering_modules(model: object, weights: WeightMap, tensors: Iterable[str]) -> list[str]:
    """Return the shortest names of transformers' modules that contain exactly these tensors.

    PEFT selects every module whose name ends with a name of the list.
    """
    theirs = module_names(model, weights)
    tensor_names = {theirs[tensor] for tensor in tensors}
    inside: dict[str, set[str]] = {}
    for name in theirs.values():
        for module in _prefixes(name):
            inside.setdefault(module, set()).add(name)
    full_modules = [module for module, names in inside.items() if names <= tensor_names]
    tops = [
        m for m in full_modules if not any(m.startswith(f"{parent}.") for parent in full_modules)
    ]
    ends = {module: module.rpartition(".")[2] for module in tops}
    modules_by_end = {end: [m for m in inside if m.endswith(end)] for end in ends.values()}
    return sorted(
        {e if set(modules_by_end[e]) <= set(tops) else module for module, e in ends.items()}
    )


def _copies(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], SavedParam]]:
    for path, node in nnx.iter_modules(model):
        if has_copies(node):
            for name, variable in get_copies(node).items():
                yield (*parameter_names.normalize_parameter_name(path), name), variable


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _is_inside(parameter: str, module: str) -> bool:
    """Return whether a parameter is in a module whose name ends with the parts of `module`."""
    return f".{module}." in f".{parameter}"


def _unknown(name: str, parameters: Iterable[str]) -> str:
    modules = dict.fromkeys(m for p in parameters for m in _prefixes(p))
    module_ends = sorted(
        {m.rpartition(".")[2] for m in modules if not m.rpartition(".")[2].isdigit()}
    )
    hint = did_you_mean(name, [*module_ends, *modules])
    return (
        f"modules_to_save: the model has no module {name!r}{hint} (last parts of the names of its "
        f"modules: {', '.join(module_ends)})"
    )


def _check_whole(weights: WeightMap, parameters: Mapping[str, None]) -> None:
    for tensor, pieces in weights.by_hf.items():
        missing_names = sorted({p.ours for p in pieces} - parameters.keys())
        if missing_names and any(p.ours in parameters for p in pieces):
            listed = ", ".join(name.rpartition(".")[0] for name in missing_names[:_LISTED])
            raise ConfigError(
                f"modules_to_save: transformers stores {tensor!r} as one tensor, and parts of it "
                f"belong to other modules: also name {listed}"
            )


def _check_untied(model: Any, weights: WeightMap, parameters: Iterable[str]) -> None:
    if not getattr(model, "is_tied", False):
        return
    for name in parameters:
        is_table = name.endswith(".embedding")
        if is_table and weights.shapes[name][0] == getattr(model.config, "vocab_size", None):
            raise ConfigError(
                f"modules_to_save: {name.rpartition('.')[0]} is also the head, and PEFT trains a "
                "copy that the head does not use: load the base with "
                "config_kwargs={'tie_word_embeddings': False} and also name the head, or omit the "
                "module"
            )
