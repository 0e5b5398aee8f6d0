"""The parameters of new LoRA adapters, as `ed_models.adapters.lora` creates them. No jax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ed_elarge.config.adaptation import LoraSection
from ed_elarge.plan.tensors import PlanTensor

#: Layers of a specification without targets.
_ALL_LINEAR = r"^(?!lm_head$|score$)"


def of(section: LoraSection, tensors: Sequence[PlanTensor]) -> Iterator[PlanTensor]:
    """Yield the matrices A and B of every adapted layer, and the lengths of DoRA."""
    patterns = [re.compile(pattern) for pattern in section.targets or (_ALL_LINEAR,)]
    for tensor in tensors:
        layer, _, last = tensor.name.rpartition(".")
        if last not in ("kernel", "embedding") or layer.endswith(".gate") or len(tensor.shape) < 2:
            continue
        if section.targets is None and (last != "kernel" or len(tensor.shape) > 2):
            continue  # without targets: linear layers alone
        if any(_matches(pattern, layer, tensor.layers) for pattern in patterns):
            yield from _adapter(section, tensor, layer)


def _matches(pattern: re.Pattern[str], layer: str, count: int) -> bool:
    """Return whether a pattern matches the name of a layer, with the number of its first layer."""
    name = layer.replace("*", "0")
    return bool(pattern.search(name) or pattern.search(name.replace(".", "/"))) and count > 0


def _adapter(section: LoraSection, tensor: PlanTensor, layer: str) -> Iterator[PlanTensor]:
    *lead, inputs, outputs = tensor.shape
    *lead_axes, input_axis, output_axis = tensor.axes
    shared = {"layers": tensor.layers, "dtype": "float32", "adapter": True}
    rank = section.rank
    yield PlanTensor(
        f"{layer}.lora_a", (*lead, inputs, rank), (*lead_axes, input_axis, None), **shared
    )
    yield PlanTensor(
        f"{layer}.lora_b", (*lead, rank, outputs), (*lead_axes, None, output_axis), **shared
    )
    if section.dora:
        name = f"{layer}.lora_magnitude"
        yield PlanTensor(name, (*lead, outputs), (*lead_axes, output_axis), **shared)
