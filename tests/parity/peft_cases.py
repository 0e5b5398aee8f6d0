"""Common parts of the comparisons with PEFT: adapters with an effect, and our logits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from ed_infra.specs import LoraSpec
from ed_layers.lora.saved_modules import SavedParam
from ed_models.adapters.lora import apply_lora, lora_layers
from ed_models.conformance import forward
from flax import nnx


def trained(model: Any, spec: LoraSpec) -> Any:
    """Return a model with adapters that change the logits."""
    model = apply_lora(model, spec, key=jax.random.key(1))
    for i, (_, layer) in enumerate(lora_layers(model)):
        for name in ("lora_a", "lora_b"):
            variable = getattr(layer, name)
            noise = 0.1 * jax.random.normal(jax.random.key(i), variable.shape)
            variable.set_value(variable.get_value() + noise)
    state = nnx.state(model, SavedParam)
    for i, (_, variable) in enumerate(nnx.to_flat_state(state)):
        noise = 0.1 * jax.random.normal(jax.random.key(100 + i), variable.get_value().shape)
        variable.set_value(variable.get_value() + noise)
    nnx.update(model, state)
    return model


def our_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    return np.asarray(forward(model, input_ids=ids).logits)


#: Layers of dense and shared networks.
DENSE = r"(?<![./]experts)[./](gate|up|down)_proj$"


def takes_dense_for_experts(model_type: str) -> bool:
    """Whether PEFT treats the names of `DENSE` as experts everywhere in a family: no layer of a
    dense or shared network can have an adapter there."""
    from peft.utils import transformers_weight_conversion as conversion

    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return kind in conversion._MOE_TARGET_MODULE_MAPPING
