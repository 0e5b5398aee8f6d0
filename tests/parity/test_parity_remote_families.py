"""Families outside transformers read and write published tensors, and match torch references."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.registry import get_module
from ed_models.checkpoints import hub
from ed_models.conformance import ONE, forward

from tests.conformance.cases import subjects

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.parity.remote_families import REFERENCES  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.daily("internlm2", "grok-1")
@pytest.mark.parametrize("model_type", REFERENCES)
def test_published_checkpoint_has_the_logits_of_the_torch_reference(
    model_type: str, tmp_path: Path
) -> None:
    reference = REFERENCES[model_type]()
    tensors = reference.tensors()
    published, again = tmp_path / "published", tmp_path / "again"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(reference.config))
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})

    cls = get_module(TaskType.CAUSAL_LM, model_type)
    model = hub.from_pretrained(published, cls, sharding_axis_dims=ONE)
    ids = np.random.default_rng(0).integers(0, reference.config["vocab_size"], (2, 24))
    ours = forward(model, input_ids=ids).logits
    theirs = torch.stack([reference.logits(tensors, torch.tensor(row)) for row in ids])
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), atol=1e-4)

    model.save_pretrained(again)
    written = load_file(again / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_every_language_model_outside_transformers_has_a_torch_reference() -> None:
    alone = {
        subject.model_type
        for subject in subjects()
        if subject.task == TaskType.CAUSAL_LM and not subject.is_in_transformers
    }
    # transformers has no class of some text halves. The conformance of the whole model, with and
    # without images, compares their numbers.
    whole = {subject.model_type for subject in subjects()}
    alone -= {name for name in alone if name.removesuffix("_text") in whole - {name}}
    # The class of deepseek_v3 computes kimi_k2.
    assert alone - {"kimi_k2"} == REFERENCES.keys()
