"""Adapters by slots in every family: a flat batch over pages mixes them, and each sequence has the
numbers of its adapter alone.

Two families by default, one with a fused projection and one with latents and experts; nightly all.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import parameter_names
from ed_infra.enums import TaskType
from ed_infra.specs import LoraSpec
from ed_layers.cache import RaggedBatch
from ed_layers.lora.slots import LoRASlots, SlotParam, write_slot
from ed_models.adapters.lora import apply_lora, lora_layers
from ed_models.adapters.slots import slot_values, with_slots
from ed_models.adapters.values import get_adapter
from ed_models.conformance import Subject, checks, forward
from flax import nnx

from tests.conformance.cases import subjects

BY_DEFAULT = ("phi3",)
#: Which place each of the rows uses.
PLACES = (0, 2, 1, 2)


def rows() -> list[Any]:
    params, seen = [], set()
    for subject in subjects():
        if subject.task != TaskType.CAUSAL_LM:
            continue
        first = subject.model_type not in seen
        seen.add(subject.model_type)
        fast = first and subject.model_type in BY_DEFAULT
        marks = [pytest.mark.xdist_group(f"conformance {subject.model_type}")]
        marks += [pytest.mark.torch] if subject.is_in_transformers else []
        marks += [] if fast else [pytest.mark.nightly]
        params.append(pytest.param(subject, marks=marks, id=str(subject)))
    return params


def learned(model: Any, layers: list[str], seed: int) -> Any:
    model = apply_lora(model, {LoraSpec(rank=seed, alpha=2.0): layers})
    for i, (_, layer) in enumerate(lora_layers(model)):
        key = jax.random.fold_in(jax.random.key(seed), i)
        layer.lora_b.set_value(0.1 * jax.random.normal(key, layer.lora_b.shape))
    return model


@pytest.mark.parametrize("subject", rows())
@pytest.mark.nightly
def test_sequences_of_a_batch_have_adapters_of_their_own(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = subject.model
    served = with_slots(base, 2, 3)
    layers = [
        name
        for path, node in nnx.iter_modules(served)
        if isinstance(node, LoRASlots)
        for name in parameter_names.canonical(parameter_names.normalize_parameter_name(path))
    ]
    expected = [np.asarray(forward(base, input_ids=subject.ids).logits)]
    state = nnx.state(served, SlotParam)
    for place in (1, 2):
        model = learned(base, layers, place)
        expected.append(np.asarray(forward(model, input_ids=subject.ids).logits))
        state = jax.tree.map(
            lambda leaf, value, place=place: write_slot(leaf, jnp.asarray(place), value),
            state,
            slot_values(served, get_adapter(model)),
        )
    nnx.update(served, state)
    assert np.abs(expected[2] - expected[0]).max() > 1e-3
    mixed = np.stack([expected[place][row] for row, place in enumerate(PLACES)])
    ids = jnp.asarray(PLACES, jnp.int32)
    monkeypatch.setattr(checks, "RaggedBatch", partial(RaggedBatch, adapter_ids=ids))
    case = copy(subject)
    case.model, case.logits = served, mixed
    checks.pages(case)
