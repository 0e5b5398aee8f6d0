"""Modules that are trained in full beside adapters, exchanged with PEFT (`modules_to_save`)."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.specs import LoraSpec
from ed_layers.lora.saved_modules import SavedParam
from ed_models.adapters.lora import has_lora, merge_lora, remove_lora
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.adapters.values import get_adapter, put_adapter
from ed_models.conformance import Subject, forward
from flax import nnx

from tests.conformance.cases import subjects
from tests.parity.peft_cases import trained

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")

BERT = "bert: encoder (sequence-classification)"
LLAMA = "llama: biases, llama3 rope"
#: Configuration -> the modules that we name, and the modules in PEFT's file.
CASES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    BERT: (("classifier",), ["classifier"]),
    LLAMA: (("lm_head", "embed_tokens"), ["embed_tokens", "lm_head"]),
    "roberta: encoder (sequence-classification)": (("classifier",), ["classifier"]),
    "distilbert: encoder (sequence-classification)": (
        ("pre_classifier", "classifier"),
        ["classifier", "pre_classifier"],
    ),
    "bert: encoder (question-answering)": (("qa_outputs",), ["qa_outputs"]),
    "bert: encoder (token-classification)": (("classifier",), ["classifier"]),
    "gpt2: scores by layer, own sizes": (("lm_head", "c_fc", "ln_f"), ["c_fc", "lm_head", "ln_f"]),
    "qwen2: biases": (("lm_head", "layers.1.mlp"), ["lm_head", "model.layers.1.mlp"]),
}
TASK_TYPES = {
    TaskType.CAUSAL_LM: "CAUSAL_LM",
    TaskType.SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    TaskType.TOKEN_CLASSIFICATION: "TOKEN_CLS",
    TaskType.QUESTION_ANSWERING: "QUESTION_ANS",
}


def spec_of(name: str, **changes: Any) -> LoraSpec:
    return LoraSpec(rank=2, alpha=3.0, modules_to_save=CASES[name][0], **changes)


def ours(model: Any, subject: Subject) -> np.ndarray:
    return np.asarray(subject.output(forward(model, **subject.build_padded_inputs())))[subject.real]


@functools.cache
def subject_of(name: str) -> Subject:
    import torch
    import transformers

    found = next(row for row in subjects() if str(row) == name)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(found.model_type, **found.fields)
    subject = copy.copy(found)
    subject.__dict__["torch_model"] = found.torch_class.from_config(config).float().eval()
    return subject


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_saved_modules_are_interchangeable_with_peft(name: str, tmp_path: Path) -> None:
    subject = subject_of(name)
    model = trained(subject.model, spec_of(name))
    got = ours(model, subject)
    assert np.abs(got - ours(subject.model, subject)).max() > 1e-3
    save_adapter(model, tmp_path / "ours")
    settings = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert settings["modules_to_save"] == CASES[name][1]
    assert settings["task_type"] == TASK_TYPES[subject.task]
    base = copy.deepcopy(subject.torch_model)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    near(got, subject.torch_outputs(theirs)[subject.real])
    near(ours(load_adapter(subject.model, tmp_path / "ours"), subject), got)
    near(ours(merge_lora(model), subject), got)
    change(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = subject.torch_outputs(theirs)[subject.real]
    assert np.abs(expected - got).max() > 1e-3
    near(ours(load_adapter(subject.model, tmp_path / "theirs"), subject), expected)


def near(got: np.ndarray, expected: np.ndarray) -> None:
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, atol=bound, rtol=0)


def change(model: Any) -> None:
    """Change the trained parameters of a model of PEFT."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                value.add_(torch.randn_like(value), alpha=0.1)


def test_saved_module_trains_beside_adapters_and_base_stays() -> None:
    subject = subject_of(BERT)
    model = trained(subject.model, spec_of(BERT))
    _, params, _ = model.split_module()
    names = {path[-1] for path, _ in nnx.to_flat_state(params)}
    assert names == {"lora_a", "lora_b", "kernel", "bias"}
    saved = [x for _, x in nnx.to_flat_state(params) if isinstance(x, SavedParam)]
    assert len(saved) == 2, "kernel and bias of the classifier"
    base = remove_lora(model)
    assert not has_lora(base)
    expected = dict(nnx.to_flat_state(nnx.state(subject.model)))
    for path, variable in nnx.to_flat_state(nnx.state(base)):
        np.testing.assert_array_equal(variable.get_value(), expected[path].get_value())


@pytest.mark.nightly
def test_merged_adapter_with_saved_module_is_undone_exactly() -> None:
    subject = subject_of(LLAMA)
    adapted = put_adapter(subject.model, get_adapter(trained(subject.model, spec_of(LLAMA))))
    got = ours(adapted, subject)
    merged = adapted.merge_adapter()
    assert not has_lora(merged)
    near(ours(merged, subject), got)
    np.testing.assert_array_equal(ours(merged.unmerge_adapter(), subject), got)
    both = adapted.apply_lora(LoraSpec(rank=2), name="other")
    np.testing.assert_array_equal(ours(both.set_adapter("default"), subject), got)


@pytest.mark.nightly
def test_saved_module_over_quantized_weights_has_plain_copy(tmp_path: Path) -> None:
    subject = subject_of(BERT)
    base = subject.model.quantize([("", {"dtype": "nf4", "group_size": 16})])
    model = trained(base, spec_of(BERT))
    save_adapter(model, tmp_path)
    near(ours(load_adapter(base, tmp_path), subject), ours(model, subject))
    np.testing.assert_array_equal(ours(remove_lora(model), subject), ours(base, subject))


def test_unknown_module_raises_error_with_suggestion() -> None:
    subject = subject_of(BERT)
    with pytest.raises(ConfigError, match="no module 'clasifier'; did you mean 'classifier'"):
        subject.model.apply_lora(LoraSpec(rank=2, modules_to_save="clasifier"))


def test_embedding_that_is_also_the_head_is_rejected() -> None:
    subject = next(row for row in subjects() if str(row) == "llama: tied")
    with pytest.raises(ConfigError, match="is also the head"):
        subject.model.apply_lora(LoraSpec(rank=2, modules_to_save="embed_tokens"))


def test_file_of_another_head_names_the_shapes(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    subject = subject_of(BERT)
    save_adapter(trained(subject.model, spec_of(BERT)), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.classifier.bias"] = np.zeros(9, np.float32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"classifier.bias: \[9\] does not fit \[\d\]"):
        load_adapter(subject.model, tmp_path)
