"""Adapters of a whole model: applying, merging and removing them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import jax
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.rules import Rules
from ed_infra.specs import LoraSpec
from ed_layers.lora.layers import ADAPTED, AdaptedLayer, LoRAEmbed
from ed_layers.lora.saved_modules import drop_copies, has_copies, keep_copies
from ed_layers.projections.linear import Linear
from ed_layers.quantization.model import QuantParam, get_matrix
from ed_layers.quantization.qarray import QArray
from ed_layers.transform import Replace, rejoin, transform
from flax import nnx

from ed_models.adapters.decomposition import decompose_weights
from ed_models.adapters.loftq import start_over_codes
from ed_models.adapters.saved_modules import find_parameters, with_saved_modules

M = TypeVar("M", bound=nnx.Module)

#: The targets of a specification without targets, as PEFT's "all-linear".
ALL_LINEAR = r"^(?!lm_head$|score$|mtp[./])"


def apply_lora(
    model: M, spec: LoraSpec | Mapping[LoraSpec, list[str]], *, key: jax.Array | None = None
) -> M:
    """Return a copy of a model whose layers have adapters; its other arrays are shared.

    Args:
        model: any module.
        spec: rank, scale, dropout, targets, modules to save and initial values. Linear layers and
            embeddings can be targets. Or several specifications, each with the canonical names of
            its layers.
        key: random key; the same key produces the same adapters in every layout of the layers.

    Raises:
        ConfigError: the model has adapters, a target matches no layer, or a module to save does
            not exist; or the initial values decompose weights that are quantized.
    """
    adapted = attach_adapters(model, spec, key=key)
    decompose_weights(lora_layers(adapted))
    start_over_codes(lora_layers(adapted))
    return adapted


def attach_adapters(
    model: M, spec: LoraSpec | Mapping[LoraSpec, list[str]], *, key: jax.Array | None = None
) -> M:
    """Return a copy of a model with adapters, for `apply_lora` or for values that replace theirs.

    Adapters whose initial values decompose the weights start as plain ones.
    """
    if has_lora(model):
        raise ConfigError(
            "the model has adapters; merge them (merge_lora) or remove them (remove_lora) before "
            "new ones are put on"
        )
    if isinstance(spec, LoraSpec):
        kinds = tuple(ADAPTED) if spec.targets else (Linear,)
        targets = [(target, spec) for target in get_target_patterns(spec)]
        if spec.modules_to_save:
            return _with_saved(model, spec, key)
    else:
        kinds = tuple(ADAPTED)
        targets = [(f"^{re.escape(n)}$", one) for one, names in spec.items() for n in names]
    adapted = {one: partial(_adapt_module, one) for _, one in targets}
    rules: Rules[Replace] = Rules(((t, adapted[one]) for t, one in targets), kind="LoRA target")
    return transform(model, rules, key=key, of=kinds)


def _with_saved(model: M, spec: LoraSpec, key: jax.Array | None) -> M:
    """Add adapters to the layers outside of the saved modules, and copies of these modules."""
    saved = find_parameters(model, spec.modules_to_save or ())
    layer_spec = replace(spec, modules_to_save=None)
    kinds = tuple(ADAPTED) if spec.targets else (Linear,)
    names = {name.rpartition(".")[0] for name in saved}
    adapted = partial(_adapt_module, layer_spec)
    rules: list[tuple[str, Replace | None]] = [
        (target, adapted) for target in get_target_patterns(layer_spec)
    ]
    inside = [
        re.escape(name)
        for path, node in nnx.iter_modules(cast(nnx.Module, model))
        if isinstance(node, kinds)
        for name in parameter_names.canonical(path)
        if name in names
    ]
    if inside:
        rules.insert(0, (f"^(?:{'|'.join(inside)})$", None))
    adapted_model = transform(model, Rules(rules, kind="LoRA target"), key=key, of=kinds)
    return with_saved_modules(adapted_model, saved)


def get_target_patterns(spec: LoraSpec) -> tuple[str, ...]:
    """Return the patterns of a specification."""
    if spec.targets is None:
        return (ALL_LINEAR,)
    return (spec.targets,) if isinstance(spec.targets, str) else spec.targets


def _adapt_module(spec: LoraSpec, module: nnx.Module, key: jax.Array) -> nnx.Module:
    adapted = next(to for of, to in ADAPTED.items() if isinstance(module, of))
    return adapted(cast(Any, module), spec, key)


def merge_lora(model: M, *, dequantize: bool = False) -> M:
    """Return a copy of a model without adapters, with their updates merged into the weights.

    Args:
        dequantize: convert quantized matrices with adapters to plain matrices.

    Raises:
        ConfigError: the model has no adapters; an adapted matrix is quantized; or the embedding has
            an adapter and is also the head, which does not use the adapter.
    """
    tied = getattr(model, "is_tied", False)
    if tied and any(isinstance(layer, LoRAEmbed) for _, layer in lora_layers(model)):
        raise ConfigError(
            "the embedding has an adapter, and the head is the same matrix without one: merged "
            "they would be two; load the base with config_kwargs={'tie_word_embeddings': False}"
        )
    quantized = quantized_bases(model)
    if quantized and not dequantize:
        now, dense_size = (
            sum(sizes) / 2**20 for sizes in zip(*map(_sizes, quantized), strict=True)
        )
        raise ConfigError(
            f"matrices with adapters are quantized ({quantized[0].format}), and merged they would "
            "have to be rounded to such codes again. Most of the trained change would be lost: "
            f"merge with dequantize=True, which makes the matrices plain ({dense_size:.1f} MiB "
            "instead "
            f"of {now:.1f}), or keep the adapter separate"
        )
    return _every(model, lambda layer, _key: layer.merge_adapter(), keep_copies)


def quantized_bases(model: object) -> list[QArray]:
    """Return the quantized matrices that have adapters."""
    variables = [get_matrix(layer)[1] for _, layer in lora_layers(model)]
    return [v.get_value() for v in variables if isinstance(v, QuantParam)]


def _sizes(matrix: QArray) -> tuple[int, int]:
    """Return the bytes of a quantized matrix, and of the plain matrix."""
    return matrix.nbytes, math.prod(matrix.shape) * matrix.dtype.itemsize


def remove_lora(model: M) -> M:
    """Return a copy of a model without its adapters and with the base weights."""
    return _every(model, lambda layer, _key: layer.base(), drop_copies)


def has_lora(model: object) -> bool:
    """Return whether a layer of the model has an adapter, or is trained in full beside adapters."""
    return any(
        isinstance(node, AdaptedLayer) or has_copies(node)
        for _, node in nnx.iter_modules(cast(nnx.Module, model))
    )


def lora_layers(model: object) -> Iterator[tuple[tuple[Any, ...], AdaptedLayer]]:
    """Return the storage paths and the layers that have an adapter."""
    for path, node in nnx.iter_modules(cast(nnx.Module, model)):
        if isinstance(node, AdaptedLayer):
            yield path, node


def _every(model: M, change: Any, finish: Callable[[nnx.Module], None]) -> M:
    """Replace every adapted layer, and change every module with trained copies in place."""
    if not has_lora(model):
        raise ConfigError("the model has no adapters")
    adapted = next(lora_layers(model), None) is not None
    rules: Rules[Replace] = Rules([("", change)] if adapted else (), kind="LoRA target")
    merged_model = transform(model, rules, of=tuple(ADAPTED.values()))
    for _, node in list(nnx.iter_modules(cast(nnx.Module, merged_model))):
        finish(node)
    rejoin(merged_model)
    # Adapters that wait under a name were made for the weights before.
    vars(merged_model).pop("named_adapters", None)
    return merged_model
