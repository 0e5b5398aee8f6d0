"""Every registered family with all its matrices quantized runs, scanned, unrolled and cached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_infra import registry
from ed_layers.quantization.model import quantized_matrices
from ed_models import conformance
from ed_models.conformance import OURS, Subject
from ed_models.subjects import B, forward

#: Families of the default run: plain, experts, latents, a state, biases and a tied head.
FAST = ("llama", "mixtral", "deepseek_v3", "falcon_h1", "gpt2")
#: Families whose tiny matrices have odd dimensions, where pairs of values have no byte.
FORMATS: dict[str, str] = {}


def rows() -> list[Any]:
    """One configuration of each family; the rest of them is nightly."""
    params, seen = [], set()
    for subject in conformance.subjects():
        fast = subject.model_type in FAST and subject.model_type not in seen
        seen.add(subject.model_type)
        marks = [pytest.mark.xdist_group(f"conformance {subject.model_type}")]
        marks += [] if fast else [pytest.mark.nightly]
        params.append(pytest.param(subject, marks=marks, id=str(subject)))
    return params


@pytest.mark.parametrize("subject", rows())
def test_quantized_family(subject: Subject) -> None:
    plain = created(subject)
    model = plain.quantize([("", {"dtype": FORMATS.get(subject.model_type, "nf4")})])
    assert model.is_quantized
    assert not plain.is_quantized
    logits = forward(model, input_ids=subject.ids).logits
    expected = forward(model.dequantize(), input_ids=subject.ids).logits
    scale = max(1.0, float(np.abs(expected).max()))
    near: dict[str, Any] = {"atol": OURS * scale, "rtol": 0}
    np.testing.assert_allclose(logits, expected, err_msg="plain matrices", **near)
    cache, at = model.init_cache(B, 32), 0
    for n in (16, 1):
        out = forward(model, input_ids=subject.ids[:, at : at + n], past_key_values=cache)
        np.testing.assert_allclose(out.logits, logits[:, at : at + n], err_msg="cache", **near)
        cache, at = out.past_key_values, at + n
    other = "leaves" if plain.layout == "stacked" else "stacked"
    turned = forward(model.to_layout(other), input_ids=subject.ids).logits
    np.testing.assert_allclose(turned, logits, err_msg=other, **near)
    bits = [8 * w.nbytes / np.prod(w.shape) for _, w in quantized_matrices(model)]
    assert max(bits) < 16, "in memory"


def created(subject: Subject) -> Any:
    """With random weights of ours: no torch is needed."""
    config = registry.get_config(subject.model_type)(
        **subject.fields, sharding_axis_dims=conformance.ONE
    )
    return subject.module_class.create(config, seed=0)
