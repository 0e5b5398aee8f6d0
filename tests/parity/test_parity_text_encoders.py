"""Encoders of T5 and its relatives alone, compared with `T5EncoderModel` of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_models.checkpoints import hub
from ed_models.conformance import forward
from safetensors.numpy import load_file

pytestmark = pytest.mark.torch

FIELDS = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
#: Class -> fields of its configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "t5 v1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {}),
    "longt5 local": ("LongT5", {"local_radius": 4}),
    "longt5 global": (
        "LongT5",
        {
            "local_radius": 4,
            "encoder_attention_type": "transient-global",
            "global_block_size": 4,
        },
    ),
}
IDS = np.random.default_rng(0).integers(1, 64, (3, 16))
MASK = (np.arange(16) < np.array([[16], [12], [8]])).astype(np.int32)


def build(name: str, folder: Path, kind: str = "EncoderModel") -> tuple[Any, np.ndarray]:
    """Save a model of transformers, and return it with the hidden states of its encoder."""
    import torch
    import transformers

    family, fields = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FIELDS, **fields)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        output = model.get_encoder()(input_ids=torch.tensor(IDS), attention_mask=torch.tensor(MASK))
    return model, output.last_hidden_state.numpy()


def assert_near(model: Any, expected: np.ndarray) -> None:
    states = forward(model, input_ids=IDS, attention_mask=MASK).last_hidden_state
    np.testing.assert_allclose(np.asarray(states)[MASK > 0], expected[MASK > 0], atol=1e-5)


@pytest.mark.daily("t5")
@pytest.mark.parametrize("name", CASES)
def test_encoders_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch_model, expected = build(name, tmp_path / "theirs")
    model: Any = hub.from_pretrained(tmp_path / "theirs", task="auto-bind")
    assert type(model).model_task == TaskType.BASE_MODULE
    assert_near(model, expected)
    model.save_pretrained(tmp_path / "ours")
    architecture = type(torch_model).__name__
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(value, theirs[key]) for key, value in ours.items())
    assert type(model.to_torch()).__name__ == architecture


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_the_encoder_of_a_whole_checkpoint_embeds_texts_in_the_engine(
    name: str, tmp_path: Path
) -> None:
    from ed_esurge.engine import eSurge

    _, expected = build(name, tmp_path, "ForConditionalGeneration")
    model: Any = hub.from_pretrained(tmp_path, task="embedding")
    assert_near(model, expected)
    engine = eSurge(model, None, max_model_len=32, max_num_seqs=2)
    prompts = [row[: int(mask.sum())].tolist() for row, mask in zip(IDS, MASK, strict=True)]
    for output, states, mask in zip(engine.embed(prompts), expected, MASK, strict=True):
        mean = states[mask > 0].mean(axis=0)
        vector = np.asarray(output.pooled)
        cosine = vector @ mean / np.linalg.norm(vector) / np.linalg.norm(mean)
        np.testing.assert_allclose(cosine, 1.0, atol=1e-5)
