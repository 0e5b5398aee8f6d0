"""Adapter slots: a model that serves many adapters in one step.

`RaggedBatch.adapter_ids` maps each sequence to a slot. Layers whose rows are not tokens (a module
lists them in `without_tokens`), embeddings and the head have no slots. Experts have slots if a
target matches them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.rules import Rules
from ed_layers.lora.layers import LowRank
from ed_layers.lora.slots import LoRASlots, SlotParam, get_slot_shape
from ed_layers.moe.adapter_slots import ExpertSlots
from ed_layers.moe.experts import Experts
from ed_layers.projections.linear import ExpertLinear, Linear
from ed_layers.quantization.model import quantized_matrices
from ed_layers.transform import Replace, transform
from flax import nnx

from ed_models.adapters.lora import ALL_LINEAR, has_lora
from ed_models.adapters.values import Adapter, LayerAdapter, M, get_layer_adapters

_LISTED = 10


def with_slots(model: M, slots: int, rank: int, targets: Sequence[str] | None = None) -> M:
    """Return a copy of a model whose linear layers and experts have empty adapter slots.

    Args:
        model: a model without adapters on its layers.
        slots: maximum number of loaded adapters.
        rank: maximum rank of an adapter.
        targets: patterns over canonical names of layers; None = every linear layer except the head
            and the experts, whose slots need more memory than those of all other layers.

    Raises:
        ConfigError: a target matches no layer, or the model has adapters on its layers.
    """
    if has_lora(model):
        raise ConfigError(
            "the model has an adapter on its layers, and no others can be served with it: merge "
            "it (unwrap_lora_to_layers), or remove it (set_adapter(None)) and load it by name"
        )
    left_out = [
        re.escape(f"{name}.{layer}" if name else layer)
        for path, node in nnx.iter_modules(model)
        for layer in getattr(type(node), "without_tokens", ())
        for name in parameter_names.canonical(parameter_names.normalize_parameter_name(path))
    ]
    rules: list[tuple[str, Replace | None]] = []
    if left_out:
        rules.append((f"^(?:{'|'.join(left_out)})$", None))

    def places(layer: nnx.Module, key: jax.Array) -> nnx.Module:
        if isinstance(layer, ExpertLinear):
            return ExpertSlots(layer, slots, rank, dtype)
        assert isinstance(layer, Linear), "only linear layers and experts have slots"
        return LoRASlots(layer, slots, rank)

    experts = (x for _, x in nnx.iter_modules(model) if isinstance(x, Experts))
    dtype = next((x.dtype for x in experts if x.dtype is not None), jnp.float32)
    rules += [(target, places) for target in targets or (ALL_LINEAR,)]
    kinds = (Linear, ExpertLinear) if targets else (Linear,)
    return transform(model, Rules(rules, kind="target of served adapters"), of=kinds)


def slot_values(model: nnx.Module, adapter: Adapter) -> nnx.State:
    """Return the contents of one slot: the structure of the model's `SlotParam`s for one adapter.

    Args:
        model: a model from `with_slots`; its arrays may be abstract, unless the contents of an
            adapter with DoRA are read: they depend on the weights.
        adapter: adapter values by canonical name, from `convert_to_plain`.

    Returns:
        float32 arrays [*layers, i, r], [*layers, r, o] and [*layers, 1, o]; [*layers, e, i, r] and
        [*layers, e, r, o] of experts. The scale is multiplied into B. Layers that the adapter does
        not change have zeros, zeros and ones.

    Raises:
        ConfigError: the adapter exceeds the rank of the slots, contains numbers that are not
            finite, has modules that are trained in full, or changes layers without slots; the
            message lists all problems.
    """
    wrong: list[str] = []
    places = dict(_places(model))
    codes = {name for names, _ in quantized_matrices(model) for name in names}
    for name, layer in adapter.items():
        parent, _, matrix = name.rpartition(".")
        if not isinstance(layer, LayerAdapter):
            wrong.append(f"{parent}: a module that is trained in full (modules_to_save)")
        elif matrix == "embedding":
            wrong.append(f"{parent}: an embedding")
        elif layer.a.ndim == 3 and parent not in places:
            wrong.append(f"{parent}: experts without slots (lora_targets: [self_attn, experts])")
        elif parent not in places:
            wrong.append(f"{parent}: a layer that serves no adapters")
        elif layer.spec.quantizes_weights and name not in codes:
            wrong.append(f"{parent}: LoftQ, whose codes the served matrix does not have")
        elif layer.spec.rank > places[parent]:
            wrong.append(f"{parent}: rank {layer.spec.rank} is above {places[parent]}")
        elif not (np.isfinite(layer.a).all() and np.isfinite(layer.b).all()):
            wrong.append(f"{parent}: numbers that are not finite")
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        listed = "\n  ".join([*wrong[:_LISTED], *more])
        raise ConfigError(
            "this adapter cannot be served with others; merge it into a separate model "
            f"(load_adapter, unwrap_lora_to_layers):\n  {listed}"
        )

    def values(path: tuple[object, ...], variable: nnx.Variable) -> nnx.Variable:
        assert isinstance(variable, SlotParam), "the state was filtered"
        field, is_stacked = path[-1], parameter_names.is_stacked(path)
        out = np.full(get_slot_shape(variable), field == "lora_gain", np.float32)
        for i, name in enumerate(parameter_names.canonical(path[:-1])):
            layer, place = layers.get(f"{name}.kernel"), out[i] if is_stacked else out
            if field == "lora_gain":
                if name in gains:
                    place[0] = gains[name]
            elif layer is not None:
                value = layer.a if field == "lora_a" else layer.b * layer.spec.scale
                place[..., : value.shape[-2], : value.shape[-1]] = value
        return variable.replace(out)

    layers = get_layer_adapters(adapter)
    gains = dict(_gains(model, layers))
    flat = nnx.to_flat_state(nnx.state(model, SlotParam))
    return nnx.from_flat_state([(path, values(path, variable)) for path, variable in flat])


def _gains(
    model: nnx.Module, layers: Mapping[str, LayerAdapter]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the factor of the outputs of each layer with DoRA: the trained norm of each column,
    divided by the norm of the column with the adapter. Abstract weights yield nothing."""
    for path, node in nnx.iter_modules(model):
        if not isinstance(node, LoRASlots):
            continue
        kernel = node.kernel.get_value()
        path = parameter_names.normalize_parameter_name(path)
        for i, name in enumerate(parameter_names.canonical(path)):
            layer = layers.get(f"{name}.kernel")
            if layer is None or layer.magnitude is None or _is_abstract(kernel):
                continue
            layer_kernel = kernel
            if parameter_names.is_stacked(path):
                layer_kernel = jax.tree.map(lambda leaf, i=i: leaf[i], kernel)
            a, b = jnp.asarray(layer.a), jnp.asarray(layer.b)
            weight = LowRank(layer_kernel, a, b, scale=layer.spec.scale)
            length = jnp.linalg.norm(weight.dense(), axis=0)
            yield name, np.asarray(layer.magnitude / np.asarray(length), np.float32)


def _is_abstract(tree: object) -> bool:
    """Whether arrays have only shapes and dtypes."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _places(model: nnx.Module) -> Iterator[tuple[str, int]]:
    """Return the canonical names of the layers with slots, and the rank of the slots."""
    for path, node in nnx.iter_modules(model):
        if isinstance(node, LoRASlots | ExpertSlots):
            rank = node.lora_b.get_value().shape[-2]
            for name in parameter_names.canonical(parameter_names.normalize_parameter_name(path)):
                yield name, rank
