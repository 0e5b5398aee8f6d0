"""Every registered family with quantized matrices computes the numbers of plain matrices.

A default run looks at the logits of a few families; nightly at all of them, and at caches and other
storage too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_layers.quantization.model import quantized_matrices
from ed_models.conformance import ONE, OURS, B, Subject, forward

from tests.conformance.cases import subjects

#: Families of the default run: plain, experts, biases and a tied head.
FAST = ("llama", "mixtral", "gpt2")
#: Families whose tiny matrices have odd dimensions, where pairs of values have no byte.
FORMATS = dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "8bit")


def rows(*, fast: bool) -> list[Any]:
    """One configuration of a few families, or all of them."""
    params, seen = [], set()
    for subject in subjects():
        if subject.task != TaskType.CAUSAL_LM:
            continue
        if not fast or (subject.model_type in FAST and subject.model_type not in seen):
            mark = pytest.mark.xdist_group(f"conformance {subject.model_type}")
            params.append(pytest.param(subject, marks=mark, id=str(subject)))
        seen.add(subject.model_type)
    return params


def quantized(subject: Subject) -> tuple[Any, dict[str, Any]]:
    """The model, and how near its numbers are to be."""
    plain = created(subject)
    model = plain.quantize([("", {"dtype": FORMATS.get(subject.model_type, "nf4")})])
    assert model.is_quantized
    assert not plain.is_quantized
    # The weights of one output share a scale: two or three of them (dt_proj) do not outweigh it.
    long = [w for _, w in quantized_matrices(model) if w.shape[-2] > 4]
    assert max(8 * w.nbytes / np.prod(w.shape) for w in long) < 16, "in memory"
    expected = forward(model.dequantize(), input_ids=subject.ids).logits
    near = {"atol": OURS * max(1.0, float(np.abs(expected).max())), "rtol": 0}
    logits = forward(model, input_ids=subject.ids).logits
    np.testing.assert_allclose(logits, expected, err_msg="plain matrices", **near)
    return model, near


@pytest.mark.nightly
@pytest.mark.parametrize("subject", rows(fast=True))
def test_quantized_family_passes_conformance_check(subject: Subject) -> None:
    quantized(subject)


@pytest.mark.nightly
@pytest.mark.parametrize("subject", rows(fast=False))
def test_quantized_family_in_every_storage(subject: Subject) -> None:
    model, near = quantized(subject)
    logits = forward(model, input_ids=subject.ids).logits
    cache, at = model.init_cache(B, 32), 0
    for n in (16, 1):
        out = forward(model, input_ids=subject.ids[:, at : at + n], past_key_values=cache)
        np.testing.assert_allclose(out.logits, logits[:, at : at + n], err_msg="cache", **near)
        cache, at = out.past_key_values, at + n
    other = "leaves" if model.layout == "stacked" else "stacked"
    turned = forward(model.to_layout(other), input_ids=subject.ids).logits
    np.testing.assert_allclose(turned, logits, err_msg=other, **near)


def created(subject: Subject) -> Any:
    """With random weights of ours: no torch is needed."""
    # As in a checkpoint: some of Hugging Face's classes accept fields that they do not name.
    config = registry.get_config(subject.model_type).from_dict(
        subject.fields, sharding_axis_dims=ONE
    )
    return subject.module_class.create(config, seed=0)
