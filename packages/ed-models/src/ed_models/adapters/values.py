"""The values of adapters, independent of a model: for files, named adapters and slots.

Legend: i in features, o out features, r rank, e experts, v vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from ed_infra import parameter_names
from ed_infra.specs import LoraSpec
from ed_layers.lora.layers import LoRALinear
from ed_layers.quantization.model import get_matrix
from flax import nnx

from ed_models.adapters.loftq import put_codes
from ed_models.adapters.lora import attach_adapters, lora_layers
from ed_models.adapters.saved_modules import put_saved_values, saved_values, with_saved_modules

M = TypeVar("M", bound=nnx.Module)


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """The adapter of one layer, float32 in host memory.

    Attributes:
        spec: rank, scale and the other settings.
        a, b: [i, r] and [r, o]; for experts [e, i, r] and [e, r, o]; for an embedding [v, r] and
            [r, d].
        magnitude: the column norms that DoRA trained, [o]; None without DoRA.
        initial_a, initial_b: [i, r] and [r, o], the part of the weights that the adapter started
            with and that the layer subtracts; None for an adapter that started without an effect.
    """

    spec: LoraSpec
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None
    initial_a: np.ndarray | None = None
    initial_b: np.ndarray | None = None

    def to_plain(self) -> LayerAdapter:
        """Return an adapter of the unchanged weights: [A, A0] and [B, -B0] have twice the rank."""
        if self.initial_a is None or self.initial_b is None:
            return self
        return self.subtract_part(self.initial_a, self.initial_b)

    def subtract_part(self, part_a: np.ndarray, part_b: np.ndarray) -> LayerAdapter:
        """Return an adapter whose second part subtracts `part_a @ part_b`, with the same scale."""
        scale = self.spec.scale
        rank = self.spec.rank + part_a.shape[1]
        alpha = scale * (rank**0.5 if self.spec.rslora else rank)
        spec = replace(self.spec, rank=rank, alpha=alpha, init_lora_weights=True)
        a = np.concatenate([self.a, part_a.astype(np.float32)], axis=1)
        b = np.concatenate([self.b, -part_b.astype(np.float32)], axis=0)
        return LayerAdapter(spec, a, b, self.magnitude)


#: Canonical name of a matrix (`model.layers.3.self_attn.q_proj.kernel`) -> its adapter; canonical
#: name of a parameter that is trained in full -> its values, float32.
Adapter = Mapping[str, LayerAdapter | np.ndarray]


def get_adapter(model: nnx.Module) -> dict[str, LayerAdapter | np.ndarray]:
    """Return the active adapter of a model; empty if no adapter is active."""
    return {**dict(_read(model)), **saved_values(model)}


def get_layer_adapters(adapter: Adapter) -> dict[str, LayerAdapter]:
    """Return the low-rank part of an adapter."""
    return {name: x for name, x in adapter.items() if isinstance(x, LayerAdapter)}


def convert_to_plain(adapter: Adapter) -> dict[str, LayerAdapter | np.ndarray]:
    """Return an adapter of the unchanged weights, as files and servers hold it."""
    return {n: x.to_plain() if isinstance(x, LayerAdapter) else x for n, x in adapter.items()}


def get_full_parameters(adapter: Adapter) -> dict[str, np.ndarray]:
    """Return the parameters of an adapter that are trained in full."""
    return {name: x for name, x in adapter.items() if not isinstance(x, LayerAdapter)}


def uses_dora(adapter: Adapter) -> bool:
    """Return whether a layer of an adapter has column norms, so that it depends on the weights."""
    return any(layer.magnitude is not None for layer in get_layer_adapters(adapter).values())


def put_adapter(model: M, adapter: Adapter) -> M:
    """Return a copy of a model with an active adapter.

    Args:
        model: a model without an active adapter.
        adapter: the values of an adapter for a model with the same shapes. Plain weights under an
            adapter that started with LoftQ become its codes.
    """
    by_spec: dict[LoraSpec, list[str]] = {}
    layers, saved = get_layer_adapters(adapter), get_full_parameters(adapter)
    for name, layer in layers.items():
        by_spec.setdefault(layer.spec, []).append(name.rpartition(".")[0])
    adapted = attach_adapters(model, by_spec) if by_spec else model
    for path, layer in lora_layers(adapted):
        if isinstance(layer, LoRALinear) and isinstance(layer.kernel, nnx.Param):
            put_codes(path, layer)
        path = parameter_names.normalize_parameter_name(path)
        names = [f"{name}.{get_matrix(layer)[0]}" for name in parameter_names.canonical(path)]
        for field in ("a", "b", "magnitude", "initial_a", "initial_b"):
            values = [getattr(layers[name], field) for name in names]
            if values[0] is not None:
                stacked = np.stack(values) if parameter_names.is_stacked(path) else values[0]
                getattr(layer, f"lora_{field}").set_value(stacked)
    return put_saved_values(with_saved_modules(adapted, saved), saved) if saved else adapted


def _read(model: nnx.Module) -> Iterator[tuple[str, LayerAdapter]]:
    for path, layer in lora_layers(model):
        path = parameter_names.normalize_parameter_name(path)
        values = {
            field: np.asarray(getattr(layer, f"lora_{field}").get_value(), np.float32)
            for field in ("a", "b", "magnitude", "initial_a", "initial_b")
            if hasattr(layer, f"lora_{field}")
        }
        for i, name in enumerate(parameter_names.canonical(path)):
            layer_values = {
                k: v[i] if parameter_names.is_stacked(path) else v for k, v in values.items()
            }
            yield f"{name}.{get_matrix(layer)[0]}", LayerAdapter(layer.spec, **layer_values)
