"""Adapters of vision-language, audio, speech, image and encoder-decoder models, with PEFT.

Names in files are those of the modules of transformers 5; names of earlier releases are read, too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.specs import LoraSpec
from ed_models.adapters.peft import load_adapter, read_adapter, save_adapter
from ed_models.conformance import Subject, forward
from safetensors.numpy import load_file, save_file

from tests.conformance.cases import subjects
from tests.parity.peft_cases import DENSE, takes_dense_for_experts, trained

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")

#: Of the largest output.
BOUND = 3e-4
#: One family of each kind of names runs by default.
BY_DEFAULT = ("llava: patches", "qwen2_vl:", "vit:")
#: Linear layers of this project that are no linear layers in transformers.
#: SigLIP's pooler is torch's `MultiheadAttention`, whose matrices are no linear layers.
LEFT_OUT = r"embed|router|downsample|pooler.attention"
#: Model types whose adapters PEFT does not load, or loads with other outputs.
NOT_EXCHANGED: tuple[str, ...] = ()


def rows() -> list[Any]:
    """Return the first configuration of each task of the families that are no decoders of text."""
    params, seen = [], set()
    for subject in subjects():
        key = subject.model_type, subject.task
        if subject.task == TaskType.CAUSAL_LM or key in seen or not subject.is_in_transformers:
            continue
        if subject.model_type in NOT_EXCHANGED:
            continue
        seen.add(key)
        is_daily = str(subject).startswith(BY_DEFAULT) and subject.task != TaskType.BASE_VISION
        marks = [] if is_daily else [pytest.mark.nightly]
        params.append(pytest.param(subject, marks=marks, id=f"{subject.model_type} {subject.task}"))
    return params


def our_outputs(subject: Subject, model: Any) -> np.ndarray:
    return np.asarray(subject.output(forward(model, **subject.build_padded_inputs())))[subject.real]


def their_outputs(subject: Subject, model: Any) -> np.ndarray:
    return subject.torch_outputs(model)[subject.real]


def assert_near(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, atol=BOUND * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.daily("vit image-classification")
@pytest.mark.parametrize("subject", rows())
def test_adapters_of_all_linear_layers_are_exchanged_with_peft(
    subject: Subject, tmp_path: Path
) -> None:
    import torch

    left_out = LEFT_OUT
    if takes_dense_for_experts(subject.model_type):
        left_out = f"{left_out}|{DENSE}"
    spec = LoraSpec(rank=2, alpha=3.0, targets=rf"^(?!lm_head$|score$)(?!.*(?:{left_out}))")
    model = trained(subject.model, spec)
    expected = our_outputs(subject, model)
    save_adapter(model, tmp_path / "ours")
    torch_model = copy.deepcopy(subject.torch_model)
    theirs = peft.PeftModel.from_pretrained(torch_model, tmp_path / "ours").eval()
    assert np.abs(expected - our_outputs(subject, subject.model)).max() > 1e-4
    assert_near(their_outputs(subject, theirs), expected)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_adapter(subject.model, tmp_path / "theirs")
    assert_near(our_outputs(subject, again), their_outputs(subject, theirs))


#: Family -> prefixes in transformers 5 and in earlier releases.
OLD_NAMES = {
    "llava": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "gemma3": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
    },
    "qwen2_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen2_audio": {
        "model.language_model.": "language_model.model.",
        "model.audio_tower.": "audio_tower.",
    },
    "vit": {
        "vit.layers.": "vit.encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
    },
}


@pytest.mark.daily("vit")
@pytest.mark.parametrize("family", OLD_NAMES)
def test_adapters_with_names_of_earlier_releases_are_read(family: str, tmp_path: Path) -> None:
    subject = next(s for s in subjects(family) if s.task != TaskType.BASE_VISION)
    targets = r"^(?!lm_head$|score$).*(?:q_proj|o_proj|up_proj|linear_1)$"
    model = trained(subject.model, LoraSpec(rank=2, targets=targets))
    save_adapter(model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for new, old in OLD_NAMES[family].items():
        assert any(new in name for name in tensors), new
        tensors = {name.replace(new, old, 1): value for name, value in tensors.items()}
    save_file(tensors, file)
    names = read_adapter(subject.model, tmp_path)
    again = load_adapter(subject.model, tmp_path)
    assert len(names) == len(tensors) // 2
    np.testing.assert_array_equal(our_outputs(subject, again), our_outputs(subject, model))
