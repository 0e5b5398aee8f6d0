"""Adapters of every family in PEFT's layout: saved and loaded here, and exchanged with PEFT.

One configuration of a few families runs by default; nightly all configurations of all model types.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.specs import LoraSpec
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.adapters.values import get_adapter
from ed_models.conformance import Subject

from tests.conformance.cases import subjects
from tests.parity.peft_cases import DENSE, our_logits, takes_dense_for_experts, trained

pytest.importorskip("torch")

BOUND = 1e-5
#: Default run: a plain family, a fused projection, experts, a tied head.
BY_DEFAULT = (
    "llama: tied",
    "phi3: window",
    "qwen3_moe: every second layer",
    "mixtral: two of eight",
)
EVERYTHING = LoraSpec(rank=2, alpha=3.0, targets=r"^(?!lm_head$|score$)(?!.*embed)")
#: PEFT's layout has no adapters for experts that are one matrix along inputs or outputs.
HOMELESS: dict[str, tuple[str, ...]] = {r"[./]experts[./]": ("dbrx",)}
#: Layers that PEFT 0.21 does not adapt, or that transformers 5.23 computes without the adapter.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    **HOMELESS,
    # PEFT rejects the name in these families.
    r"[./]out_proj$": ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"),
    # transformers multiplies by the weight of this layer and ignores PEFT's wrapper.
    r"[./]dt_proj$": ("falcon_mamba", "jamba", "mamba"),
    # The gate of the attention is named `gate_proj`, which PEFT treats as a part of experts.
    r"self_attn[./]g_proj$": ("afmoe",),
    # transformers creates matrices for these experts, so PEFT's are larger than a checkpoint's.
    r"[./]experts[./].*": ("longcat_flash: experts that do nothing",),
}


class Small(Subject):
    """Return initial weights of usual size: the logits, and so their rounding errors, are small."""

    @functools.cached_property
    def torch_model(self) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **self.fields)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for name, value in model.named_parameters():
            if name.endswith("router.gate.weight") and not value.any():
                # Experts of a router of zeros tie, and torch and JAX choose different ones (AFMoE).
                torch.nn.init.normal_(value, std=0.02)
        return model


def rows(*, torch: bool) -> list[Any]:
    params = []
    for row in subjects():
        if row.task != TaskType.CAUSAL_LM:
            continue
        if torch and not row.is_in_transformers:
            continue
        marks = [pytest.mark.xdist_group(f"peft {row.model_type}")]
        marks += [] if str(row).startswith(BY_DEFAULT) else [pytest.mark.nightly]
        small = Small(row.model_type, row.row, row.module_class, row.cases)
        params.append(pytest.param(small, marks=marks, id=str(row)))
    return params


def spec_in_peft(subject: Subject) -> LoraSpec:
    """Return all layers that have an adapter in PEFT."""
    dense = {DENSE: (subject.model_type,)} if takes_dense_for_experts(subject.model_type) else {}
    return without({**LEFT_OUT, **dense}, subject)


def without(left_out: dict[str, tuple[str, ...]], subject: Subject) -> LoraSpec:
    """Return all layers except those of this family, or of this configuration."""
    names = {subject.model_type, str(subject)}
    out = [pattern for pattern, left in left_out.items() if names.intersection(left)]
    none = "".join(f"(?!.*{pattern})" for pattern in out)
    return replace(EVERYTHING, targets=f"{EVERYTHING.targets}{none}")


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        out = model(torch.tensor(ids, dtype=torch.long), use_cache=False)
    return out.logits.float().numpy()


def in_peft(subject: Subject, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(copy.deepcopy(subject.torch_model), folder).eval()


@pytest.mark.nightly
@pytest.mark.parametrize("subject", rows(torch=False))
def test_saved_adapter_produces_same_logits_when_reloaded(subject: Subject, tmp_path: Path) -> None:
    model = trained(subject.model, without(HOMELESS, subject))
    ids = subject.ids[:2]
    expected = our_logits(model, ids)
    assert np.abs(expected - our_logits(subject.model, ids)).max() > 1e-4
    save_adapter(model, tmp_path)
    again = load_adapter(subject.model, tmp_path)
    assert get_adapter(again).keys() == get_adapter(model).keys()
    np.testing.assert_allclose(our_logits(again, ids), expected, atol=BOUND)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("subject", rows(torch=True))
def test_adapters_are_interchangeable_with_peft(subject: Subject, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    import torch

    ids = subject.ids[:2]
    model = trained(subject.model, spec_in_peft(subject))
    save_adapter(model, tmp_path / "ours")
    theirs = in_peft(subject, tmp_path / "ours")
    np.testing.assert_allclose(torch_logits(theirs, ids), our_logits(model, ids), atol=BOUND)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_adapter(subject.model, tmp_path / "theirs")
    np.testing.assert_allclose(our_logits(model, ids), torch_logits(theirs, ids), atol=BOUND)
