"""Adapters of every family: saved in PEFT's layout and read again; ours in PEFT, and PEFT's in ours.

One configuration of a few families by default; nightly all configurations of all model types.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.specs import LoraSpec
from ed_models.adapter_values import adapter_of
from ed_models.adapters import apply_lora, lora_layers
from ed_models.conformance import Subject, forward, subjects
from ed_models.peft import load_adapter, save_adapter

BOUND = 1e-5
#: What a default run looks at: a plain family, a fused projection, experts, a tied head.
BY_DEFAULT = ("llama: tied", "phi3", "qwen3_moe: every second layer", "mixtral: two of eight")
LINEAR = r"^(?!lm_head$|score$)(?!.*embed)"
EVERYTHING = LoraSpec(rank=2, alpha=3.0, targets=LINEAR)
#: PEFT 0.21 takes `gate_proj`, `up_proj` and `down_proj` of these families for those of experts,
#: wherever they are: no layer of a dense or shared network can have an adapter there.
WITHOUT_DENSE = LoraSpec(
    rank=2, alpha=3.0, targets=LINEAR + r"(?!.*(?<!\.experts)\.(gate|up|down)_proj$)"
)
#: What PEFT itself cannot do with a family of transformers: the reason, and where it shows.
IMPOSSIBLE: dict[str, str] = {}


class Small(Subject):
    """Weights as a model begins with them: its logits, and so their rounding, are small."""

    @functools.cached_property
    def torch_model(self) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **self.fields)
        return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def rows(*, torch: bool) -> list[Any]:
    params = []
    for row in subjects():
        if torch and not row.is_in_transformers:
            continue
        marks = [pytest.mark.xdist_group(f"peft {row.model_type}")]
        marks += [] if str(row).startswith(BY_DEFAULT) else [pytest.mark.nightly]
        small = Small(row.model_type, row.row, row.module_class)
        params.append(pytest.param(small, marks=marks, id=str(row)))
    return params


def spec_in_peft(subject: Subject) -> LoraSpec:
    """All layers that PEFT can put an adapter on."""
    from peft.utils import transformers_weight_conversion as conversion

    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(subject.model_type)
    return WITHOUT_DENSE if family in conversion._MOE_TARGET_MODULE_MAPPING else EVERYTHING


def learned(model: Any, spec: LoraSpec = EVERYTHING) -> Any:
    """A model with adapters that change something, on every linear layer and expert."""
    model = apply_lora(model, spec, key=jax.random.key(1))
    for i, (_, layer) in enumerate(lora_layers(model)):
        for name in ("lora_a", "lora_b"):
            variable = getattr(layer, name)
            noise = 0.1 * jax.random.normal(jax.random.key(i), variable.shape)
            variable.set_value(variable.get_value() + noise)
    return model


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    return np.asarray(forward(model, input_ids=ids).logits)


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        out = model(torch.tensor(ids, dtype=torch.long), use_cache=False)
    return out.logits.float().numpy()


def in_peft(subject: Subject, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(copy.deepcopy(subject.torch_model), folder).eval()


@pytest.mark.parametrize("subject", rows(torch=False))
def test_saved_and_read_again(subject: Subject, tmp_path: Path) -> None:
    model = learned(subject.model)
    ids = subject.ids[:2]
    expected = logits_of(model, ids)
    assert np.abs(expected - logits_of(subject.model, ids)).max() > 1e-4
    save_adapter(model, tmp_path)
    again = load_adapter(subject.model, tmp_path)
    assert adapter_of(again).keys() == adapter_of(model).keys()
    np.testing.assert_allclose(logits_of(again, ids), expected, atol=BOUND)


@pytest.mark.torch
@pytest.mark.parametrize("subject", rows(torch=True))
def test_ours_in_peft_and_pefts_in_ours(subject: Subject, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    import torch

    if reason := IMPOSSIBLE.get(str(subject)):
        pytest.skip(reason)
    ids = subject.ids[:2]
    model = learned(subject.model, spec_in_peft(subject))
    save_adapter(model, tmp_path / "ours")
    theirs = in_peft(subject, tmp_path / "ours")
    np.testing.assert_allclose(torch_logits(theirs, ids), logits_of(model, ids), atol=BOUND)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_adapter(subject.model, tmp_path / "theirs")
    np.testing.assert_allclose(logits_of(model, ids), torch_logits(theirs, ids), atol=BOUND)
