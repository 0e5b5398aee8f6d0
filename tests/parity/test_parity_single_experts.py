"""Adapters of single experts, as vLLM and transformers before 5 name them, equal PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.specs import LoraSpec
from ed_models.adapters.peft import read_adapter, save_adapter
from ed_models.adapters.saved_modules import build_weight_map
from ed_models.adapters.values import LayerAdapter, get_adapter
from safetensors.numpy import save_file

from tests.parity.peft_cases import our_logits, trained
from tests.parity.test_parity_peft import base_of, logits_of, subject_of

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")


def write_single_experts(model: Any, folder: Path, *, without: int | None = None) -> None:
    """Save an adapter on experts with a module for each expert."""
    save_adapter(model, folder)  # for the settings
    adapter, tensors = get_adapter(model), {}
    for ours, pieces in build_weight_map(model).by_ours.items():
        layer = adapter.get(ours)
        if not isinstance(layer, LayerAdapter):
            continue
        for piece in pieces:
            expert = piece.our_region[0]
            assert isinstance(expert, int)
            name = f"base_model.model.{piece.hf.removesuffix('.weight')}"
            if expert != without:
                tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(layer.a[expert].T)
                tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(layer.b[expert].T)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "adapter_config.json").read_text())
    names = sorted({name.split(".")[-3] for name in tensors})
    rank = next(iter(adapter.values())).spec.rank
    settings |= {"target_modules": names, "target_parameters": None, "r": rank}
    settings |= {"lora_alpha": 5.0, "rank_pattern": {}, "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.daily("mixtral")
def test_adapters_of_single_experts_are_joined(family: str, tmp_path: Path) -> None:
    model = trained(subject_of(family).model, LoraSpec(rank=2, alpha=5.0, targets=r"\.experts\."))
    expected = get_adapter(model)
    write_single_experts(model, tmp_path)
    got = read_adapter(subject_of(family).model, tmp_path)
    assert got.keys() == expected.keys()
    for name, layer in got.items():
        other = expected[name]
        assert isinstance(layer, LayerAdapter) and isinstance(other, LayerAdapter)
        assert layer.spec.scale == other.spec.scale
        np.testing.assert_array_equal(layer.a, other.a)
        np.testing.assert_array_equal(layer.b, other.b)
    write_single_experts(model, tmp_path, without=1)
    for layer in read_adapter(subject_of(family).model, tmp_path).values():
        assert isinstance(layer, LayerAdapter)
        assert not layer.b[1].any() and layer.b[0].any()


@pytest.mark.nightly
def test_peft_computes_the_same_logits(tmp_path: Path) -> None:
    subject = subject_of("mixtral")
    model = trained(subject.model, LoraSpec(rank=2, alpha=5.0, targets=r"\.experts\."))
    write_single_experts(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base_of(subject), tmp_path).eval()
    np.testing.assert_allclose(
        logits_of(theirs, subject.ids), our_logits(model, subject.ids), atol=1e-5
    )


def test_single_experts_of_other_sizes_are_refused_by_name(tmp_path: Path) -> None:
    model = trained(subject_of("mixtral").model, LoraSpec(rank=2, targets=r"\.experts\."))
    write_single_experts(model, tmp_path)
    other = subject_of("qwen3_moe").model
    with pytest.raises(CheckpointError, match=r"another model[\s\S]*experts"):
        read_adapter(other, tmp_path)
