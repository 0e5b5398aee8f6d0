"""Added token rows, compared with `resize_token_embeddings` of transformers and with PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.specs import LoraSpec
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.checkpoints import hub
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.conformance import Subject, forward

from tests.conformance.cases import subjects
from tests.parity.peft_cases import trained

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")

MORE = 7
#: One family of each kind of tables and heads runs by default.
BY_DEFAULT = ("llama causal", "bert masked", "bart sequence", "t5 sequence", "gemma4 ")
#: transformers resizes the table of T5Gemma's encoder, but leaves its configuration unchanged.
WITHOUT_CONFIGURATION = ("t5gemma",)


def rows() -> list[Any]:
    """Return the first configuration of each task of the families with tokens."""
    params, seen = [], set()
    for subject in subjects():
        key = subject.model_type, subject.task
        if key in seen or not subject.is_in_transformers:
            continue
        seen.add(key)
        name = f"{subject.model_type} {subject.task}"
        marks = [] if name.startswith(BY_DEFAULT) else [pytest.mark.nightly]
        params.append(pytest.param(subject, marks=marks, id=name))
    return params


def resized(subject: Subject) -> tuple[Any, int]:
    """Return the torch model with more rows, and the number of rows."""
    model = copy.deepcopy(subject.torch_model)
    try:
        size = model.get_input_embeddings().num_embeddings + MORE
        model.resize_token_embeddings(size)
    except (NotImplementedError, AttributeError, TypeError):
        pytest.skip("transformers does not resize the model")
    return model, size


@pytest.mark.daily(
    "bert masked-language-model", "llama causal-language-model", "t5 sequence-to-sequence"
)
@pytest.mark.parametrize("subject", rows())
def test_resized_checkpoints_equal_those_of_transformers(subject: Subject, tmp_path: Path) -> None:
    if not isinstance(getattr(subject.model.config.get_text_config(), "vocab_size", None), int):
        pytest.skip("the model has no tokens")
    theirs, size = resized(subject)
    theirs.save_pretrained(tmp_path / "theirs")
    subject.model.resize_token_embeddings(size).save_pretrained(tmp_path / "ours")
    ours, torch_files = (TensorFiles.open(tmp_path / name) for name in ("ours", "theirs"))
    assert hub.read_config(tmp_path / "ours").get_text_config().vocab_size == size
    if subject.model_type not in WITHOUT_CONFIGURATION:
        hub.check_weights(tmp_path / "theirs", subject.task)
    for name in ours.keys() & torch_files.keys():
        expected = torch_files.read(name)
        assert ours[name].shape == expected.shape, name
        np.testing.assert_allclose(ours.read(name), expected, atol=1e-4, err_msg=name)


@pytest.mark.daily("q_proj-llama")
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("targets", ["q_proj", "q_proj|embed_tokens"])
def test_adapters_with_added_tokens_are_exchanged_with_peft(
    family: str, targets: str, tmp_path: Path
) -> None:
    import torch

    subject = next(s for s in subjects(family) if s.task == TaskType.CAUSAL_LM)
    theirs, size = resized(subject)
    ids = subject.ids + MORE
    assert ids.max() >= size - MORE
    base = subject.model.resize_token_embeddings(size, seed=3)
    model = trained(base, LoraSpec(rank=2, alpha=3.0, targets=targets))
    expected = np.asarray(forward(model, input_ids=ids).logits)
    save_adapter(model, tmp_path / "ours")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(theirs), tmp_path / "ours").eval()
    with torch.no_grad():
        got = loaded(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    bound = 3e-4 * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=bound)
    with torch.no_grad():
        for name, value in loaded.named_parameters():
            if "lora_" in name or "embed_tokens" in name:
                value.add_(0.05 * torch.randn(value.shape))
        got = loaded(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    loaded.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    again = load_adapter(subject.model, tmp_path / "theirs")
    np.testing.assert_allclose(np.asarray(forward(again, input_ids=ids).logits), got, atol=bound)
