"""Adapter files in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

A matrix of the checkpoint may be several of ours (queries, keys and values in one), and the other
way round its blocks may alternate; the family's `WEIGHTS` say how, for adapters as for weights.
Layers of ours that are one matrix there share its A when a file is read. When one is written whose
layers have learned different A, they stand one under another, and its rank is their sum.

Legend: i in features, o out features, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ed_infra import paths
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, ConfigError, did_you_mean
from ed_infra.specs import LoraSpec
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ed_models.adapters import M, apply_lora, lora_layers
from ed_models.checkpoints.checks import ADAPTER_NAME
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.weight_map import WeightMap

CONFIG, TENSORS = ADAPTER_NAME, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"
_LISTED = 10

#: Settings of PEFT that change numbers and are not computed here: name -> the value that is.
_UNUSED: dict[str, object] = {
    "bias": "none",
    "modules_to_save": None,
    "target_parameters": None,
    "layers_pattern": None,
    "layer_replication": None,
    "lora_bias": False,
    "use_qalora": False,
    "alora_invocation_tokens": None,
}


class Adapted(Protocol):
    """A model, as far as adapter files go."""

    config: EasyDeLBaseConfig


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer of ours, as numpy: a [i, r], b [r, o], magnitude [o] or None."""

    spec: LoraSpec
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None


def save_adapter(model: Any, directory: str | Path, *, base: str | None = None) -> None:
    """Write the adapters of a model; PEFT loads them onto the base model.

    Args:
        model: with adapters, from `apply_lora`.
        directory: made if it is not there.
        base: id or directory of the base model, for `base_model_name_or_path`.

    Raises:
        ConfigError: the model has no adapters, or its checkpoint has no place for one.
    """
    adapters = dict(_adapters_of(model))
    if not adapters:
        raise ConfigError("the model has no adapters; save_pretrained writes its weights")
    weights = _base_map(model)
    tensors: dict[str, np.ndarray] = {}
    specs: dict[str, LoraSpec] = {}
    for theirs in sorted({piece.hf for name in adapters for piece in weights.by_ours[name]}):
        module = theirs.removesuffix(".weight")
        specs[module], parts = _written(theirs, weights, adapters)
        tensors |= {f"{_PREFIX}{module}.{name}": value for name, value in parts.items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    settings = _settings(specs, weights, base)
    (directory / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_adapter(model: M, directory: str | Path) -> M:
    """Return a copy of a model with the adapters of a directory in PEFT's layout.

    Raises:
        CheckpointError: a file is missing or broken, or the adapter was made for another model:
            the message lists the modules and shapes that do not fit.
        ConfigError: the adapter uses what is not computed here.
    """
    directory = Path(directory)
    settings = _read_settings(directory / CONFIG)
    try:
        tensors = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / TENSORS} cannot be read: {error}") from error
    adapters = _ours(_by_module(tensors, directory), settings, _base_map(model), directory)
    by_spec: dict[LoraSpec, list[str]] = {}
    for name, adapter in adapters.items():
        by_spec.setdefault(adapter.spec, []).append(name.rpartition(".")[0])
    adapted = apply_lora(model, by_spec)
    for path, layer in lora_layers(adapted):
        names = [f"{name}.{_kernel(layer)}" for name in paths.canonical(paths.normalize(path))]
        stacked = paths.is_stacked(paths.normalize(path))
        for field in ("a", "b", "magnitude"):
            values = [getattr(adapters[name], field) for name in names]
            if values[0] is not None:
                variable = getattr(layer, f"lora_{field}")
                variable.set_value(np.stack(values) if stacked else values[0])
    return adapted


# Ours -> theirs.


def _adapters_of(model: Any) -> Iterator[tuple[str, Adapter]]:
    """Canonical name of each adapted matrix, and its adapter."""
    for path, layer in lora_layers(model):
        path = paths.normalize(path)
        stacked = paths.is_stacked(path)
        for i, name in enumerate(paths.canonical(path)):

            def read(field: str, i: int = i, layer: Any = layer, stacked: bool = stacked):
                value = np.asarray(getattr(layer, f"lora_{field}").get_value(), np.float32)
                return value[i] if stacked else value

            magnitude = read("magnitude") if layer.spec.dora else None
            yield (
                f"{name}.{_kernel(layer)}",
                Adapter(layer.spec, read("a"), read("b"), magnitude),
            )


def _written(
    theirs: str, weights: WeightMap, adapters: Mapping[str, Adapter]
) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """The adapter of one of their matrices, made of those of ours that lie in it."""
    sources = list(dict.fromkeys(p.ours for p in weights.by_hf[theirs] if p.ours in adapters))
    parts = [adapters[name] for name in sources]
    shared = all(np.array_equal(part.a, parts[0].a) for part in parts)
    ranks = [part.spec.rank for part in parts]
    rank = ranks[0] if shared else sum(ranks)
    starts = [0] * len(parts) if shared else [sum(ranks[:i]) for i in range(len(parts))]
    # The scale is one number of the layer: a larger rank has an alpha that keeps it.
    spec = parts[0].spec
    factor = rank**0.5 if spec.rslora else rank
    spec = replace(spec, rank=rank, alpha=spec.scale * factor)
    embedding = sources[0].endswith(".embedding")
    rows, columns = weights.hf_shapes[theirs]
    if _is_transposed(theirs, weights):
        rows, columns = columns, rows
    if embedding:
        a = np.zeros((rank, rows), np.float32)
        for piece in weights.by_hf[theirs]:
            a[:, _slice(piece.hf_region[0])] = parts[0].a.T[:, _slice(piece.our_region[0])]
        return spec, dict(zip(_EMBEDDING, (a, np.ascontiguousarray(parts[0].b.T)), strict=True))
    a = parts[0].a if shared else np.concatenate([part.a for part in parts], axis=1)
    b = np.zeros((rows, rank), np.float32)
    magnitude = np.zeros(rows, np.float32)
    for piece in weights.by_hf[theirs]:
        if piece.ours not in adapters:
            continue
        at = sources.index(piece.ours)
        outputs = _outputs(piece, columns)
        taken = _slice(piece.our_region[1])
        b[outputs, starts[at] : starts[at] + ranks[at]] = parts[at].b.T[taken]
        learned = parts[at].magnitude
        if learned is not None:
            magnitude[outputs] = learned[taken]
    written: dict[str, np.ndarray] = {_LINEAR[0]: np.ascontiguousarray(a.T), _LINEAR[1]: b}
    if spec.dora:
        if len(sources) < len({p.ours for p in weights.by_hf[theirs]}):
            raise ConfigError(f"{theirs!r} has parts without an adapter; dora needs all of them")
        written[_MAGNITUDE] = magnitude
    return spec, written


def _settings(
    specs: Mapping[str, LoraSpec], weights: WeightMap, base: str | None
) -> dict[str, object]:
    """The text of adapter_config.json."""
    first = next(iter(specs.values()))
    matrices = [
        name.removesuffix(".weight")
        for name, shape in weights.hf_shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    ]
    ends = sorted({name.rpartition(".")[2] for name in specs})
    all_of_them = all(name in specs for name in matrices if name.rpartition(".")[2] in ends)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": ends if all_of_them else sorted(specs),
        "rank_pattern": {n: s.rank for n, s in specs.items() if s.rank != first.rank},
        "alpha_pattern": {n: s.alpha for n, s in specs.items() if s.alpha != first.alpha},
    }


# Theirs -> ours.


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise ConfigError(
            f"{path} has the peft_type {kind!r}; adapters of the type 'LORA' are read"
        )
    for name, value in _UNUSED.items():
        if settings.get(name) not in (value, None, [], {}):
            raise ConfigError(
                f"{path} says {name}: {settings[name]!r}, which is not computed here; merge the "
                "adapter with PEFT (merge_and_unload) and load the merged model"
            )
    return settings


def _by_module(
    tensors: Mapping[str, np.ndarray], directory: Path
) -> dict[str, dict[str, np.ndarray]]:
    """Tensors of each of their modules, by their last name."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        for kind in (*_LINEAR, *_EMBEDDING, _MAGNITUDE):
            if name.endswith(".base_layer.weight"):  # a copy of the base that PEFT may add
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
    weights: WeightMap,
    directory: Path,
) -> dict[str, Adapter]:
    """The adapter of each of our matrices."""
    adapters: dict[str, Adapter] = {}
    wrong: list[str] = []
    for module, parts in modules.items():
        theirs = f"{module}.weight"
        if theirs not in weights.by_hf:
            wrong.append(f"{module}: no such module{did_you_mean(theirs, weights.by_hf)}")
            continue
        embedding = _EMBEDDING[0] in parts
        kinds = _EMBEDDING if embedding else _LINEAR
        if not all(kind in parts for kind in kinds):
            wrong.append(f"{module}: {' and '.join(kinds)} belong together")
            continue
        a, b = (parts[kind] for kind in kinds)
        shape = weights.hf_shapes[theirs]
        if embedding or _is_transposed(theirs, weights):
            shape = shape[::-1]
        if (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1]:
            wrong.append(
                f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit [o, i] = "
                f"{list(shape)}"
            )
            continue
        spec = _spec(module, a.shape[0], settings)
        for piece in weights.by_hf[theirs]:
            if embedding:
                rows = a.T[_slice(piece.hf_region[0])]
                adapters[piece.ours] = Adapter(spec, rows, b.T)
                continue
            outputs = _outputs(piece, shape[1])
            whole = adapters.get(piece.ours)
            if whole is None:
                columns = weights.shapes[piece.ours][1]
                magnitude = np.zeros(columns, np.float32) if spec.dora else None
                empty = np.zeros((a.shape[0], columns), np.float32)
                whole = adapters[piece.ours] = Adapter(spec, a.T, empty, magnitude)
            taken = _slice(piece.our_region[1])
            whole.b[:, taken] = b.T[:, outputs]
            if whole.magnitude is not None:
                whole.magnitude[taken] = parts[_MAGNITUDE][outputs]
    if wrong:
        listed = "\n  ".join(wrong[:_LISTED])
        if len(wrong) > _LISTED:
            listed += f"\n  and {len(wrong) - _LISTED} more"
        raise CheckpointError(
            f"the adapter in {directory} was made for another model than this one:\n  {listed}"
        )
    return adapters


def _spec(module: str, rank: int, settings: Mapping[str, Any]) -> LoraSpec:
    """Rank and scale of one module; patterns of names come before the setting of all."""
    alpha = settings.get("lora_alpha", rank)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    return LoraSpec(
        rank=rank,
        alpha=alpha,
        dropout=settings.get("lora_dropout") or 0.0,
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
    )


# Where our matrices lie in theirs.


def _base_map(model: Any) -> WeightMap:
    """The weight map of the model without adapters."""
    base = nnx.state(model, lambda path, variable: not isinstance(variable, nnx.LoRAParam))
    return weight_map(type(model), base, model.config)


def _is_transposed(theirs: str, weights: WeightMap) -> bool:
    """Whether a matrix of theirs is [i, o], as GPT-2's `Conv1D` has it."""
    piece = weights.by_hf[theirs][0]
    return piece.ours.endswith(".kernel") and piece.perm == (0, 1)


def _outputs(piece: Any, inputs: int) -> slice:
    """Which outputs of theirs a block of ours is."""
    if len(piece.perm) != 2 or len(piece.hf_region[piece.perm[0]]) != inputs:
        raise ConfigError(
            f"{piece.ours!r} is a part of {piece.hf!r} which has not all of its inputs; PEFT's "
            "layout has no place for its adapter"
        )
    return _slice(piece.hf_region[piece.perm[1]])


def _slice(positions: Any) -> slice:
    return slice(positions.start, positions.stop, positions.step)


def _kernel(layer: nnx.Module) -> str:
    """Name of the matrix of an adapted layer."""
    return "kernel" if hasattr(layer, "kernel") else "embedding"
