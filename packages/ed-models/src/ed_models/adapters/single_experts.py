"""Adapters of single experts: `experts.3.up_proj.lora_A.weight`, one module for each expert.

Releases of transformers before 5 have such modules, and vLLM reads their adapters. The names are
those of the tensors of a checkpoint, which the weights of the family map to our experts. A layer of
ours has the adapters of all its experts; an expert without an adapter has zeros.

Legend: e experts, i in features, o out features, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError

from ed_models.adapters.peft_settings import build_spec
from ed_models.adapters.saved_modules import build_weight_map
from ed_models.adapters.values import LayerAdapter
from ed_models.checkpoints.text_halves import text_name
from ed_models.weights.blocks import Piece

#: Tensors of one module, by their last name.
ModuleTensors = Mapping[str, np.ndarray]


def read_single_experts(
    modules: Mapping[str, ModuleTensors], settings: Mapping[str, Any], model: object
) -> tuple[dict[str, LayerAdapter], dict[str, ModuleTensors], list[str]]:
    """Join the adapters of single experts.

    Args:
        modules: module -> its tensors, A [r, i] and B [o, r].
        settings: of the adapter.
        model: the model that reads the adapter.

    Returns:
        canonical name of our matrix -> A [e, i, r] and B [e, r, o]; the other modules; and the
        modules that do not fit the model.

    Raises:
        ConfigError: the adapter has DoRA.
    """
    weights = build_weight_map(model)
    adapter: dict[str, LayerAdapter] = {}
    other_modules: dict[str, ModuleTensors] = {}
    wrong: list[str] = []
    for module, parts in modules.items():
        tensors = [f"{name}.weight" for name in (module, text_name(module) or module)]
        pieces = next((weights.by_hf[name] for name in tensors if name in weights.by_hf), [])
        expert = _get_expert(pieces)
        if expert is None:
            other_modules[module] = parts
            continue
        a, b = (parts.get(f"lora_{kind}.weight") for kind in "AB")
        ours = pieces[0].ours
        experts, inputs, outputs = weights.shapes[ours]
        fits = a is not None and b is not None and (a.shape[1], b.shape[0]) == (inputs, outputs)
        if a is None or b is None or not fits:
            shapes = {kind: list(value.shape) for kind, value in parts.items()}
            wrong.append(f"{module}: {shapes} do not fit [o, i] = {[outputs, inputs]}")
            continue
        rank = a.shape[0]
        spec = build_spec(module, rank, settings)
        if spec.dora or spec.decomposes_weights:
            raise ConfigError(
                f"the adapter of {module} has DoRA or initial values from the weights, and experts "
                "have neither: merge the adapter with the library that wrote it"
            )
        layer = adapter.get(ours)
        if layer is None:
            layer = LayerAdapter(
                spec,
                np.zeros((experts, inputs, rank), np.float32),
                np.zeros((experts, rank, outputs), np.float32),
            )
            adapter[ours] = layer
        if layer.spec != spec or b.shape[1] != rank:
            wrong.append(f"{module}: the experts of a layer have different ranks or scales")
            continue
        layer.a[expert], layer.b[expert] = a.T, b.T
    return adapter, other_modules, wrong


def _get_expert(pieces: Sequence[Piece]) -> int | None:
    """Return the number of the expert whose whole matrix [o, i] a tensor contains, or None."""
    if len(pieces) != 1 or len(pieces[0].our_region) != 3 or pieces[0].perm != (1, 0):
        return None
    expert = pieces[0].our_region[0]
    return None if isinstance(expert, range) else int(expert)
