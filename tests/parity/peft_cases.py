"""Common parts of the comparisons with PEFT: adapters with an effect, and our logits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from ed_infra.specs import LoraSpec
from ed_models.adapters.lora import apply_lora, lora_layers
from ed_models.conformance import forward


def trained(model: Any, spec: LoraSpec) -> Any:
    """Return a model with adapters that change the logits."""
    model = apply_lora(model, spec, key=jax.random.key(1))
    for i, (_, layer) in enumerate(lora_layers(model)):
        for name in ("lora_a", "lora_b"):
            variable = getattr(layer, name)
            noise = 0.1 * jax.random.normal(jax.random.key(i), variable.shape)
            variable.set_value(variable.get_value() + noise)
    return model


def our_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    return np.asarray(forward(model, input_ids=ids).logits)
