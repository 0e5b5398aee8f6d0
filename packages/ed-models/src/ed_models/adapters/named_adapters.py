"""Several adapters of one model, by name: at most one is active, or merged into the weights.

The active adapter is on the layers: it is trained, saved and computed. The values of the other
adapters are in host memory (`ed_models.adapters.values`) and do not affect the cost of a step.
`EasyDeLBaseModule` has a method for each public function of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
from ed_infra import parameter_names
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.specs import LoraSpec
from flax import nnx

from ed_models.adapters.initial_values import check_separate
from ed_models.adapters.lora import apply_lora, has_lora, merge_lora, remove_lora
from ed_models.adapters.peft import read_adapter
from ed_models.adapters.token_tables import add_token_rows
from ed_models.adapters.values import Adapter, get_adapter, put_adapter

M = TypeVar("M")

#: PEFT's name of an adapter without a name.
DEFAULT = "default"


@dataclass(frozen=True, eq=False)
class Merged:
    """An adapter that is merged into the weights, and the base weights.

    Attributes:
        name, adapter: name and values of the adapter.
        graphdef: graph definition of the base.
        matrices: storage path -> variable of the base, for the matrices that changed.
    """

    name: str
    adapter: Adapter
    graphdef: nnx.GraphDef
    matrices: Mapping[tuple[Any, ...], nnx.Variable]


@dataclass(frozen=True, eq=False)
class NamedAdapters:
    """The names of a model's adapters and the values of the inactive ones; static.

    Attributes:
        active: name of the adapter on the layers.
        waiting: the inactive adapters.
        merged: the merged adapter.
    """

    active: str = DEFAULT
    waiting: Mapping[str, Adapter] = field(default_factory=dict)
    merged: Merged | None = None


def active_adapter(model: object) -> str | None:
    """Return the name of the active adapter, or None."""
    return _get_named_adapters(model).active if has_lora(model) else None


def list_adapters(model: object) -> tuple[str, ...]:
    """Return the names of all adapters; the active or merged adapter is first."""
    named = _get_named_adapters(model)
    first = active_adapter(model) if named.merged is None else named.merged.name
    waiting = [name for name in named.waiting if name != first]
    return (*([] if first is None else [first]), *waiting)


def add_adapter(model: M, spec: LoraSpec | Mapping[LoraSpec, list[str]], name: str, seed: int) -> M:
    """Return the model with a new active adapter."""
    base, waiting = _set_aside(model, new=name)
    adapted = apply_lora(cast(nnx.Module, base), spec, key=jax.random.key(seed))
    check_separate(adapted)
    return _with(cast(M, adapted), name, waiting)


def load_named_adapter(model: M, directory: str | Path, name: str) -> M:
    """Return the model with the adapter of a directory as the active adapter."""
    base, waiting = _set_aside(model, new=name)
    module = cast(nnx.Module, base if waiting else add_token_rows(base, directory))
    return _with(cast(M, put_adapter(module, read_adapter(module, directory))), name, waiting)


def activate(model: M, name: str | None) -> M:
    """Return the model with another active adapter, or with none."""
    base, waiting = _set_aside(model)
    if name is None:
        return _with(base, DEFAULT, waiting)
    _check_name(model, name)
    remaining_adapters = {
        adapter_name: adapter for adapter_name, adapter in waiting.items() if adapter_name != name
    }
    return _with(
        cast(M, put_adapter(cast(nnx.Module, base), waiting[name])), name, remaining_adapters
    )


def delete_adapter(model: M, name: str) -> M:
    """Return the model without an adapter."""
    _check_name(model, name)
    base, waiting = _set_aside(model)
    remaining_adapters = {
        adapter_name: adapter for adapter_name, adapter in waiting.items() if adapter_name != name
    }
    current = active_adapter(model)
    if current is None or current == name:
        return _with(base, DEFAULT, remaining_adapters)
    del remaining_adapters[current]
    return _with(model, current, remaining_adapters)


def merge_adapter(model: M, name: str | None, dequantize: bool) -> M:
    """Return the model with an adapter merged into its weights."""
    active_model = model if name is None or name == active_adapter(model) else activate(model, name)
    if not has_lora(active_model):
        _check_unmerged(model)
        adapter_names = list(list_adapters(model))
        raise ConfigError(
            f"no adapter is active: pass the name of one of {adapter_names}"
            if adapter_names
            else "the model has no adapters"
        )
    named, module = _get_named_adapters(active_model), cast(nnx.Module, active_model)
    adapter = get_adapter(module)
    graphdef, base = nnx.split(remove_lora(module))
    matrices = {
        path: variable
        for path, variable in nnx.to_flat_state(base)
        if not adapter.keys().isdisjoint(parameter_names.canonical(path))
    }
    merged = Merged(named.active, adapter, graphdef, matrices)
    changed = cast(M, merge_lora(module, dequantize=dequantize))
    return _with(changed, DEFAULT, named.waiting, merged)


def unmerge(model: M) -> M:
    """Return the model with its base weights and the merged adapter as the active adapter."""
    named = _get_named_adapters(model)
    merged = named.merged
    if merged is None:
        raise ConfigError("no adapter is merged into the weights (merge_adapter merges one)")
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    if any(path not in flat for path in merged.matrices):
        raise ConfigError(
            "the layers have another layout than when the adapter was merged: restore that layout "
            "with to_layout"
        )
    base = nnx.merge(merged.graphdef, nnx.from_flat_state({**flat, **merged.matrices}))
    return _with(cast(M, put_adapter(base, merged.adapter)), merged.name, named.waiting)


def _get_named_adapters(model: object) -> NamedAdapters:
    return getattr(model, "named_adapters", None) or NamedAdapters()


def _set_aside(model: M, new: str | None = None) -> tuple[M, dict[str, Adapter]]:
    """Return the base, and all adapters by name; `new` is a name that must be free."""
    _check_unmerged(model)
    current = active_adapter(model)
    if new is not None and (not isinstance(new, str) or not new):
        raise ConfigError(f"the name of an adapter must be a non-empty string, got {new!r}")
    if new is not None and new in list_adapters(model):
        raise ConfigError(
            f"the model has an adapter named {new!r}: choose another name (name=), merge that "
            "adapter (unwrap_lora_to_layers), or remove it (delete_adapter)"
        )
    waiting = dict(_get_named_adapters(model).waiting)
    if current is None:
        return model, waiting
    module = cast(nnx.Module, model)
    return cast(M, remove_lora(module)), {current: get_adapter(module), **waiting}


def _with(model: M, active: str, waiting: Mapping[str, Adapter], merged: Merged | None = None) -> M:
    """Place a model on its mesh, and set the record of its adapters."""
    placed = cast(Any, model).shard_model()
    placed.named_adapters = NamedAdapters(active, waiting, merged)
    return placed


def _check_name(model: object, name: str) -> None:
    adapter_names = list_adapters(model)
    if name not in adapter_names:
        raise unknown_name("adapter", name, list(adapter_names))


def _check_unmerged(model: object) -> None:
    merged = _get_named_adapters(model).merged
    if merged is not None:
        raise ConfigError(
            f"the adapter {merged.name!r} is merged into the weights: undo this (unmerge_adapter) "
            "before you add, change or remove adapters"
        )
