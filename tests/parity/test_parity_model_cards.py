"""Saved models and adapters name their base, and have a card that the hub reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.specs import LoraSpec
from ed_models.auto import AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForImageTextToText
from ed_models.checkpoints.model_card import add_section, write_card
from huggingface_hub import metadata_load

from tests.conformance.cases import subjects
from tests.parity.peft_cases import our_logits, trained

IDS = np.asarray([[5, 17, 60, 33, 9, 71, 22]])
LICENSED = "---\nlicense: other\nlicense_name: example\nlanguage: en\n---\n\n# A base\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    subject = subjects("llama")[0]
    subject.model.save_pretrained(folder)
    (folder / "README.md").write_text(LICENSED)
    return folder


@pytest.mark.nightly
@pytest.mark.torch
def test_auto_class_of_peft_finds_the_base_of_an_adapter(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    model = trained(AutoEasyDeLModelForCausalLM.from_pretrained(base), LoraSpec(rank=2))
    model.save_pretrained(tmp_path / "adapter")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(our_logits(model, IDS), logits, atol=1e-4)


@pytest.mark.torch
@pytest.mark.nightly
def test_auto_class_of_peft_finds_the_class_of_a_task_without_a_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    subject = subjects("llava")[0]
    loaded: Any = AutoEasyDeLModelForImageTextToText.from_pretrained(subject.directory)
    trained(loaded, LoraSpec(rank=2, targets="q_proj")).save_pretrained(tmp_path)
    theirs = peft.AutoPeftModel.from_pretrained(tmp_path)
    assert type(theirs.get_base_model()).__name__ == "LlavaForConditionalGeneration"


@pytest.mark.parametrize("is_adapter", [False, True])
def test_card_states_base_license_and_library(base: Path, is_adapter: bool, tmp_path: Path) -> None:
    model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(base)
    model = trained(model, LoraSpec(rank=2)) if is_adapter else model
    model.save_pretrained(tmp_path / "saved")
    if not is_adapter:
        write_card(tmp_path / "saved", model)
    fields = metadata_load(tmp_path / "saved" / "README.md")
    assert fields is not None
    assert fields["base_model"] == str(base)
    assert fields["library_name"] == ("peft" if is_adapter else "transformers")
    assert (fields["license"], fields["license_name"]) == ("other", "example")
    assert ("lora" in fields["tags"]) == is_adapter and "llama" in fields["tags"]
    assert fields["pipeline_tag"] == "text-generation"
    if is_adapter:
        settings = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(base)


def test_section_of_a_card_replaces_the_section_of_its_title(base: Path, tmp_path: Path) -> None:
    model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(base)
    write_card(tmp_path, model)
    for loss in (3, 2):
        add_section(tmp_path, "Training", [f"- loss: {loss}"])
    add_section(tmp_path, "Certificate", ["- 9 passed"])
    text = (tmp_path / "README.md").read_text()
    assert text.count("## Training") == 1 and "- loss: 2" in text and "- loss: 3" not in text
    assert text.index("## Training") < text.index("## Certificate")
    fields = metadata_load(tmp_path / "README.md")
    assert fields is not None and fields["license"] == "other"


def test_cards_of_others_stay(base: Path) -> None:
    model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(base)
    write_card(base, model)
    add_section(base, "Training", ["- loss: 2"])
    assert (base / "README.md").read_text() == LICENSED
