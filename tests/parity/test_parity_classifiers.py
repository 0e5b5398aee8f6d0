"""Classifiers of texts over encoder-decoders and of recordings, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_models.checkpoints import hub
from ed_models.conformance import forward
from safetensors.numpy import load_file

from tests.conformance.cases import subjects

pytestmark = pytest.mark.torch

FIELDS: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "num_labels": 4,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "init_std": 0.2,
}
IDS = np.random.default_rng(0).integers(3, 64, (3, 12))
IDS[:, 5] = IDS[0, 11] = IDS[1, 9] = IDS[2, 8] = 2  # two ends of texts in each row
MASK = (np.arange(12) < np.array([[12], [10], [9]])).astype(np.int32)
IDS[MASK == 0] = 1


def build(family: str, folder: Path) -> np.ndarray:
    """Save a classifier of transformers, and return its logits."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FIELDS)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(IDS), "attention_mask": torch.tensor(MASK)}
        return model(**inputs).logits.numpy()


@pytest.mark.daily("Bart")
@pytest.mark.parametrize("family", ["Bart", "MBart"])
def test_classifiers_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    expected = build(family, tmp_path / "theirs")
    model: Any = hub.from_pretrained(tmp_path / "theirs", task="auto-bind")
    assert type(model).model_task == TaskType.SEQUENCE_CLASSIFICATION
    logits = np.asarray(forward(model, input_ids=IDS, attention_mask=MASK).logits)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    model.save_pretrained(tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.nightly
def test_a_classifier_is_served_and_starts_from_a_language_model(tmp_path: Path) -> None:
    from ed_esurge.engine import eSurge

    expected = build("Bart", tmp_path)
    model: Any = hub.from_pretrained(tmp_path, task="sequence-classification")
    engine = eSurge(model, None, max_model_len=32, max_num_seqs=2)
    prompts = [row[: int(mask.sum())].tolist() for row, mask in zip(IDS, MASK, strict=True)]
    for output, scores in zip(engine.embed(prompts), expected, strict=True):
        np.testing.assert_allclose(np.asarray(output.pooled), scores, atol=1e-5)
    language_model: Any = hub.from_pretrained(tmp_path, task="seq2seq")
    language_model.save_pretrained(tmp_path / "language model")
    fresh: Any = hub.from_pretrained(tmp_path / "language model", task="sequence-classification")
    assert forward(fresh, input_ids=IDS, attention_mask=MASK).logits.shape == (3, 4)


SOUND = np.random.default_rng(1).normal(size=(2, 900)).astype(np.float32)
SAMPLES = (np.arange(900) < np.array([[900], [640]])).astype(np.int32)


@pytest.mark.nightly
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_labels_of_recordings_equal_those_of_transformers(
    weighted: bool, masked: bool, tmp_path: Path
) -> None:
    import torch
    import transformers

    fields = {**subjects("wav2vec2")[0].fields, "use_weighted_layer_sum": weighted, "num_labels": 5}
    fields["classifier_proj_size"] = 12
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(**fields)
    theirs = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    if weighted:
        torch.nn.init.normal_(theirs.layer_weights)
    theirs.save_pretrained(tmp_path / "theirs")
    arrays = {"input_values": SOUND, **({"attention_mask": SAMPLES} if masked else {})}
    lengths = SAMPLES.sum(axis=1) if masked else [SOUND.shape[1]] * 2
    with torch.no_grad():  # a padded row has the numbers of the row alone
        rows = [row[None, :length] for row, length in zip(SOUND, lengths, strict=True)]
        expected = np.concatenate([theirs(torch.tensor(row)).logits.numpy() for row in rows])
    model: Any = hub.from_pretrained(tmp_path / "theirs", task="auto-bind")
    assert type(model).model_task == TaskType.AUDIO_CLASSIFICATION
    np.testing.assert_allclose(np.asarray(forward(model, **arrays).logits), expected, atol=2e-5)
    model.save_pretrained(tmp_path / "ours")
    ours, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == stored.keys()
    with pytest.raises(CheckpointError, match="scores no labels of CTC"):
        hub.from_pretrained(tmp_path / "ours", task="ctc")
