"""Adapter files in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

Which matrix of transformers' model is which of ours, `ed_models.adapters.peft_layout` knows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from ed_infra import parameter_names
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, did_you_mean
from ed_infra.specs import LoraSpec
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ed_models.adapters.initial_values import check_codes, fit_unchanged_base
from ed_models.adapters.peft_layout import (
    EXPERT_PARAMETERS,
    Matrix,
    convert_from_peft,
    convert_to_peft,
    find_matrices,
    find_module,
    merge_adapters,
    split_adapter,
)
from ed_models.adapters.peft_settings import (
    build_spec,
    get_pattern_value,
    read_adapter_settings,
    read_start,
)
from ed_models.adapters.saved_modules import (
    build_weight_map,
    covering_modules,
    list_modules,
    module_names,
)
from ed_models.adapters.single_experts import read_single_experts
from ed_models.adapters.token_tables import (
    add_token_rows,
    find_token_tables,
    save_token_tables,
)
from ed_models.adapters.values import (
    LayerAdapter,
    M,
    convert_to_plain,
    get_adapter,
    get_full_parameters,
    get_layer_adapters,
    put_adapter,
)
from ed_models.checkpoints.checks import ADAPTER_NAME
from ed_models.checkpoints.tensor_files import is_finite

CONFIG, TENSORS = ADAPTER_NAME, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_INNER = "base_layer"  # a wrapper of PEFT's within another one
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"
_LISTED = 10

#: PEFT's names of tasks whose classes of PEFT add no parameters.
_TASK_TYPES: Mapping[TaskType | None, str] = {
    TaskType.CAUSAL_LM: "CAUSAL_LM",
    TaskType.SEQUENCE_TO_SEQUENCE: "SEQ_2_SEQ_LM",
    TaskType.BASE_MODULE: "FEATURE_EXTRACTION",
    TaskType.EMBEDDING: "FEATURE_EXTRACTION",
}
#: Task -> PEFT's name, and the heads that PEFT's class of the task trains in full.
_HEADS: Mapping[TaskType | None, tuple[str, tuple[str, ...]]] = {
    TaskType.SEQUENCE_CLASSIFICATION: ("SEQ_CLS", ("classifier", "score")),
    TaskType.TOKEN_CLASSIFICATION: ("TOKEN_CLS", ("classifier", "score")),
    TaskType.QUESTION_ANSWERING: ("QUESTION_ANS", ("qa_outputs",)),
}


def save_adapter(
    model: Any, directory: str | Path, *, base: str | None = None, revision: str | None = None
) -> None:
    """Write the adapter that a model has on its layers; PEFT loads it onto the base model.

    Args:
        model: with adapters, from `apply_lora`.
        directory: made if it is not there.
        base: id, address or directory of the base model, for `base_model_name_or_path`.
        revision: branch, tag or commit of the base model on the hub.

    Raises:
        ConfigError: the model has no adapters, or transformers' model has no place for one.
    """
    adapter = convert_to_plain(get_adapter(model))
    if not adapter:
        raise ConfigError("the model has no adapters; save_pretrained writes its weights")
    matrices = find_matrices(model)
    layers, saved = get_layer_adapters(adapter), get_full_parameters(adapter)
    touched = {
        name: matrix
        for name, matrix in matrices.items()
        if any(piece.ours in layers for piece in matrix.pieces)
    }
    placed = {piece.ours for matrix in touched.values() for piece in matrix.pieces}
    if homeless := sorted(layers.keys() - placed):
        raise ConfigError(
            f"PEFT's layout has no place for adapters of {', '.join(homeless[:_LISTED])}: "
            "transformers' model has no such matrix; merge them (unwrap_lora_to_layers) and save "
            "the model"
        )
    keys = _keys(touched)
    tensors: dict[str, np.ndarray] = {}
    specs: dict[str, LoraSpec] = {}
    for name, matrix in touched.items():
        specs[name], combined_adapter = merge_adapters(matrix, layers)
        kinds = _EMBEDDING if matrix.is_embedding else _LINEAR
        for kind, value in zip(
            kinds, convert_to_peft(matrix, combined_adapter.a, combined_adapter.b), strict=True
        ):
            tensors[f"{_PREFIX}{keys[name]}.{kind}"] = value
        if combined_adapter.magnitude is not None:
            tensors[f"{_PREFIX}{keys[name]}.{_MAGNITUDE}"] = combined_adapter.magnitude
    whole_tensors, modules = _saved_tensors(model, saved)
    tensors |= whole_tensors
    tensors |= save_token_tables(model, layers, saved)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    task = getattr(type(model), "model_task", None)
    # PEFT's class for features passes embeddings, which some models of transformers do not accept.
    takes_embeddings = "inputs_embeds" in signature(type(model).__call__).parameters
    is_body = task in (TaskType.BASE_MODULE, TaskType.EMBEDDING)
    task_type = _TASK_TYPES.get(task) if takes_embeddings or not is_body else None
    if task in _HEADS and not set(_HEADS[task][1]).isdisjoint(modules):
        task_type = _HEADS[task][0]
    module_list = [n for n, matrix in matrices.items() if matrix.parameter is not None]
    module_list += list_modules(model, build_weight_map(model))
    settings = _settings(specs, touched, module_list, base, task_type)
    settings |= {"modules_to_save": modules or None, "revision": revision}
    if task_type is None:
        settings["auto_mapping"] = describe_class(model)
    (directory / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_adapter(model: M, directory: str | Path) -> M:
    """Return a copy of a model with the adapter of a directory on its layers.

    The copy has the token rows of the adapter's base (`ed_models.adapters.token_tables`).

    Raises:
        CheckpointError, ConfigError: see `read_adapter`; or the model has adapters on its layers.
    """
    model = add_token_rows(model, directory)
    return put_adapter(model, read_adapter(model, directory))


def read_adapter(model: nnx.Module, directory: str | Path) -> dict[str, LayerAdapter | np.ndarray]:
    """Read an adapter in PEFT's layout that was made for a model; its arrays are not touched.

    Raises:
        CheckpointError: a file is missing or broken, a tensor has NaN or infinite numbers, or the
            adapter was made for another model: the message lists the modules and shapes that do
            not fit.
        ConfigError: the adapter uses an unsupported setting.
    """
    directory = Path(directory)
    settings = read_adapter_settings(directory / CONFIG)
    try:
        tensors = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / TENSORS} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise CheckpointError(
                f"{directory / TENSORS}: tensor {name!r} has NaN or infinite numbers: train the "
                "adapter again, or download the file again"
            )
    saved = [name for name in tensors if _is_saved(name, settings)]
    _drop_tables(tensors, saved, model, directory)
    adapter: dict[str, LayerAdapter | np.ndarray] = {}
    if saved:
        adapter |= _ours_of_saved({name: tensors.pop(name) for name in saved}, model, directory)
    adapter |= _ours(_by_module(tensors, directory), settings, model, directory)
    if not adapter:
        raise CheckpointError(f"{directory / TENSORS} holds no adapter of any layer")
    return adapter


def attach_adapter_matrices(
    model: M, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], directory: Path
) -> M:
    """Return a copy of a model with adapters of the scale 1 on its layers.

    Args:
        model: a model without adapters.
        matrices: module of transformers -> A [i, r] and B [r, o].
        directory: the folder of the matrices, for messages.

    Raises:
        CheckpointError: matrices do not fit the model, or have numbers that are not finite.
    """
    for name, pair in matrices.items():
        if not all(map(is_finite, pair)):
            raise CheckpointError(f"{directory}: the adapter of {name} has NaN or infinite numbers")
    modules: dict[str, dict[str, np.ndarray]] = {
        name: dict(zip(_LINEAR, (matrix.T.astype(np.float32) for matrix in pair), strict=True))
        for name, pair in matrices.items()
    }
    return put_adapter(model, _ours(modules, {}, model, directory))


def _drop_tables(
    tensors: dict[str, np.ndarray],
    saved: Collection[str],
    model: Any,
    directory: Path,
) -> None:
    """Remove the tables of tokens beside an adapter, which belong to its base."""
    kinds = (*_LINEAR, *_EMBEDDING, _MAGNITUDE)
    table_names = [
        n for n in tensors if not n.endswith(tuple(f".{k}" for k in kinds)) and n not in saved
    ]
    if not table_names:
        return
    tables = find_token_tables(model)
    wrong, values = [], [tensors[name] for name in table_names if name in tables.names]
    for name in table_names:
        stored = tables.names.get(name)
        if stored is not None:
            shape, present = tensors.pop(name).shape, tables.weights.hf_shapes[stored]
            if shape != present:
                wrong.append(
                    f"{name}: {list(shape)} does not fit {list(present)}: resize the model first "
                    f"(resize_token_embeddings({shape[tables.axes[stored]]}))"
                )
        elif getattr(model, "is_tied", False) and any(
            np.array_equal(tensors[name], value) for value in values
        ):
            del tensors[name]  # the head, which PEFT also writes
    _check_fits(wrong, directory)


def _is_saved(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a tensor belongs to a module of `modules_to_save`."""
    kinds = (*_LINEAR, *_EMBEDDING, _MAGNITUDE, f"{_INNER}.weight")
    if not name.startswith(_PREFIX) or name.endswith(tuple(f".{kind}" for kind in kinds)):
        return False
    path = name.removeprefix(_PREFIX).rpartition(".")[0]
    modules = ["."]
    for part in path.split("."):
        modules.append(f"{modules[-1]}{part}.")
    # As in PEFT, a name selects every module that ends with the name.
    names = settings.get("modules_to_save") or ()
    return any(module.endswith(f"{name}.") for module in modules for name in names)


def _ours_of_saved(
    tensors: Mapping[str, np.ndarray], model: nnx.Module, directory: Path
) -> dict[str, np.ndarray]:
    """Return our parameters of the modules that are trained in full."""
    weights = build_weight_map(model)
    theirs = {_PREFIX + new: old for old, new in module_names(model, weights).items()}
    wrong, values = [], {}
    for name, value in tensors.items():
        tensor = theirs.get(name)
        if tensor is None:
            wrong.append(f"{name}: no such tensor{did_you_mean(name, theirs)}")
        elif value.shape != weights.hf_shapes[tensor]:
            wrong.append(
                f"{name}: {list(value.shape)} does not fit {list(weights.hf_shapes[tensor])}"
            )
        else:
            values[tensor] = value.astype(np.float32)
    _check_fits(wrong, directory)
    ours = dict.fromkeys(piece.ours for tensor in values for piece in weights.by_hf[tensor])
    parameters = {}
    for name in ours:
        missing_names = [p.hf for p in weights.by_ours[name] if p.hf not in values]
        wrong += [f"{tensor}: the tensor is missing" for tensor in dict.fromkeys(missing_names)]
        if not missing_names:
            parameters[name] = np.empty(weights.shapes[name], np.float32)
            window = [range(size) for size in weights.shapes[name]]
            weights.load(name, window, lambda hf, index: values[hf][index], parameters[name])
    _check_fits(wrong, directory)
    return parameters


def _check_fits(wrong: Sequence[str], directory: Path) -> None:
    if wrong:
        listed = "\n  ".join(wrong[:_LISTED])
        if len(wrong) > _LISTED:
            listed += f"\n  and {len(wrong) - _LISTED} more"
        raise CheckpointError(
            f"the adapter in {directory} was made for another model than this one:\n  {listed}"
        )


# Ours -> theirs.


def describe_class(model: Any) -> dict[str, str] | None:
    """Return the class of transformers that PEFT loads the base with, for tasks without a name.

    None for classes that transformers does not have.
    """
    from transformers import CONFIG_MAPPING

    if model.config.model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model.config.model_type]
    package, _, module = config_class.__module__.rpartition(".")
    return {
        "base_model_class": model.architecture or type(model).__name__,
        "parent_library": f"{package}.{module.replace('configuration_', 'modeling_')}",
    }


def _saved_tensors(
    model: object, saved: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the tensors of the modules that are trained in full, and the names of the modules."""
    if not saved:
        return {}, []
    weights = build_weight_map(model)
    theirs = module_names(model, weights)
    names = [n for n, pieces in weights.by_hf.items() if all(p.ours in saved for p in pieces)]
    tensors = {
        f"{_PREFIX}{theirs[name]}": np.ascontiguousarray(
            weights.save(name, lambda ours, at: saved[ours][at])
        )
        for name in names
    }
    return tensors, covering_modules(model, weights, names)


def _keys(matrices: Mapping[str, Matrix]) -> dict[str, str]:
    """Return the name of each matrix's wrapper; wrappers of one module are nested."""
    order: dict[str, list[str]] = {}
    for matrix in sorted(matrices.values(), key=_depth):
        if matrix.parameter is not None:
            order.setdefault(matrix.module, []).append(matrix.parameter)
    keys = {}
    for name, matrix in matrices.items():
        inside = 0
        if matrix.parameter is not None:
            inside = order[matrix.module].index(matrix.parameter)
        keys[name] = matrix.module + f".{_INNER}" * inside
    return keys


def _depth(matrix: Matrix) -> int:
    """Number of the wrapper of an expert parameter, from the outer one."""
    if matrix.parameter not in EXPERT_PARAMETERS:
        return 0
    return -EXPERT_PARAMETERS.index(matrix.parameter)


def _settings(
    specs: Mapping[str, LoraSpec],
    touched: Mapping[str, Matrix],
    module_list: Sequence[str],
    base: str | None,
    task_type: str | None,
) -> dict[str, object]:
    """The text of adapter_config.json."""
    first = next(iter(specs.values()), LoraSpec())

    def targets(parameters: bool) -> list[str]:
        """Return the last parts of the names if these are unique, otherwise the names."""
        target_names = {n for n, m in touched.items() if (m.parameter is not None) == parameters}
        parts = 2 if parameters else 1
        ends = sorted({".".join(name.split(".")[-parts:]) for name in target_names})
        matching_names = {
            name for name in module_list if ".".join(name.split(".")[-parts:]) in ends
        }
        return ends if matching_names == target_names else sorted(target_names)

    start: dict[str, object] = {}
    if first.loftq_config is not None:
        loftq_config = asdict(first.loftq_config)
        start = {"init_lora_weights": first.init_lora_weights, "loftq_config": loftq_config}
    return {
        **start,
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": targets(False),
        "target_parameters": targets(True) or None,
        "rank_pattern": {n: s.rank for n, s in specs.items() if s.rank != first.rank},
        "alpha_pattern": {n: s.alpha for n, s in specs.items() if s.alpha != first.alpha},
    }


# Theirs -> ours.


def _by_module(
    tensors: Mapping[str, np.ndarray], directory: Path
) -> dict[str, dict[str, np.ndarray]]:
    """Tensors of each of their modules, by their last name."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        for kind in (*_LINEAR, *_EMBEDDING, _MAGNITUDE):
            if name.endswith(f".{_INNER}.weight"):  # a copy of the base that PEFT may add
                break
            if name.startswith(_PREFIX) and name.endswith(f".{kind}"):
                module = name[len(_PREFIX) : -len(kind) - 1]
                modules.setdefault(module, {})[kind] = value.astype(np.float32)
                break
        else:
            raise CheckpointError(f"{directory / TENSORS} holds {name!r}, which is no adapter")
    return modules


def _ours(
    modules: Mapping[str, Mapping[str, np.ndarray]],
    settings: Mapping[str, Any],
    model: nnx.Module,
    directory: Path,
) -> dict[str, LayerAdapter]:
    """The adapter of each of our matrices."""
    matrices = find_matrices(model)
    shapes = dict(_shapes(model))
    named = set(settings.get("target_parameters") or ())
    touched = {
        name: matrix
        for name, matrix in matrices.items()
        if matrix.parameter is None or any(f".{name}".endswith(f".{end}") for end in named)
    }
    by_key = {key: touched[name] for name, key in _keys(touched).items()}
    start = read_start(settings, directory / CONFIG)
    adapter, modules, wrong = read_single_experts(modules, settings, model)
    for stored_module, parts in modules.items():
        module = find_module(model, stored_module, by_key)
        matrix = by_key.get(module)
        if matrix is None:
            wrong.append(f"{module}: no such module{did_you_mean(module, by_key)}")
            continue
        kinds = _EMBEDDING if matrix.is_embedding else _LINEAR
        if not all(kind in parts for kind in kinds):
            wrong.append(f"{module}: {' and '.join(kinds)} belong together")
            continue
        a, b = (parts[kind] for kind in kinds)
        ours = convert_from_peft(matrix, a, b)
        if ours is None:
            inputs, outputs = matrix.sizes
            of = "" if matrix.experts is None else f" of {matrix.experts} experts"
            wrong.append(
                f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit [o, i] = "
                f"{[outputs, inputs]}{of}"
            )
            continue
        rank = ours[0].shape[-1]
        expected = get_pattern_value(matrix.name, settings.get("rank_pattern"), settings.get("r"))
        if expected not in (None, rank):
            wrong.append(f"{module}: the rank is {rank}, and the settings have {expected}")
            continue
        spec = build_spec(matrix.name, rank, settings)
        magnitude = None
        if spec.dora:
            magnitude = parts.get(_MAGNITUDE)
            if magnitude is None or magnitude.shape != (matrix.sizes[1],):
                got = "missing" if magnitude is None else f"{list(magnitude.shape)}"
                wrong.append(f"{module}: {_MAGNITUDE} is {got}, not [{matrix.sizes[1]}]")
                continue
        layer_adapter = LayerAdapter(spec, *ours, magnitude)
        if start is not None and not matrix.is_embedding:
            layer_adapter = fit_unchanged_base(layer_adapter, matrix, model, start)
        if not matrix.is_embedding:
            check_codes(spec, matrix, model)
        adapter |= split_adapter(matrix, layer_adapter, shapes)
    _check_fits(wrong, directory)
    return adapter


def _shapes(model: nnx.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical names and shapes of the variables of each layer."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape = variable.get_value().shape
        for name in parameter_names.canonical(path):
            yield name, shape[1:] if parameter_names.is_stacked(path) else shape
