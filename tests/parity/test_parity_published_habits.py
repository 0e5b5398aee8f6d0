"""Calls that published models are used with: arrays of processors, long texts, padding, scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra import registry
from ed_infra.config.fields import FIELDS
from ed_infra.enums import TaskType
from ed_models.auto import AutoEasyDeLModel, AutoEasyDeLModelForSeq2SeqLM
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.hub import read_config
from ed_models.generation.prompts import PromptBatch, encoder_inputs

from tests.conformance.cases import subjects

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.daily("roberta")
@pytest.mark.parametrize(
    "family", ["roberta", pytest.param("xlm-roberta", marks=pytest.mark.nightly)]
)
def test_positions_without_a_mask_follow_from_the_padding_token(
    family: str, tmp_path: Path
) -> None:
    import transformers

    fields = subjects(family)[0].fields
    model = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(family, **fields)
    ).eval()
    model.save_pretrained(tmp_path)
    pad = model.config.pad_token_id
    ids = np.asarray([[5, 9, 33, 71, pad, pad], [8, 90, 41, 12, 55, 6], [pad, 7, pad, 9, 11, 12]])
    ours: Any = AutoEasyDeLModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).last_hidden_state.numpy()
    np.testing.assert_allclose(np.asarray(ours(ids).last_hidden_state), expected, atol=3e-4)


@pytest.mark.parametrize(
    ("length", "limit", "width"),
    [(10, 24, 16), (17, 24, 24), (24, 24, 24), (25, 24, 25), (9, None, 16)],
)
def test_encoder_inputs_are_not_padded_beyond_the_positions(
    length: int, limit: int | None, width: int
) -> None:
    prompts = PromptBatch.read(np.ones((1, length), np.int32), None, None, 10)
    assert encoder_inputs(prompts, limit)["input_ids"].shape[1] == width


@pytest.mark.nightly
def test_generation_reads_texts_as_long_as_the_encoder(tmp_path: Path) -> None:
    import transformers

    fields = {**subjects("bart")[0].fields, "max_position_embeddings": 48}
    config = transformers.BartConfig(**fields)
    torch.manual_seed(0)
    model: Any = transformers.BartForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(3, fields["vocab_size"], (1, 40))
    ours: Any = AutoEasyDeLModelForSeq2SeqLM.from_pretrained(tmp_path)
    got = ours.generate(ids, max_new_tokens=5).sequences
    expected = model.generate(torch.tensor(ids), max_new_tokens=5, do_sample=False, num_beams=1)
    np.testing.assert_array_equal(np.asarray(got)[0, : expected.shape[1]], expected[0].numpy())


@pytest.mark.parametrize(
    "name", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"]
)
def test_cross_encoder_of_sentence_transformers_6_keeps_its_activation(
    name: str, tmp_path: Path
) -> None:
    from ed_esurge.model import _score_activation

    subject = subjects("bert")[0]
    settings = {"model_type": "bert", "num_labels": 1, **subject.fields}
    settings["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "modules.json").write_text("[]")
    pair = {"model_type": "CrossEncoder", "activation_fn": name}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(pair))
    assert detect_task(tmp_path) == TaskType.SEQUENCE_CLASSIFICATION
    config = read_config(tmp_path, TaskType.SEQUENCE_CLASSIFICATION)
    assert _score_activation(config) == name.rpartition(".")[2].lower()
    pair["model_type"] = "SentenceTransformer"
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(pair))
    assert detect_task(tmp_path) == TaskType.EMBEDDING


def test_speech_classes_are_public() -> None:
    import ed_models

    for name in ("AutoEasyDeLModelForSpeechSeq2Seq", "AutoEasyDeLModelForCTC"):
        assert getattr(ed_models, name).__name__ == name
        assert name in ed_models.__all__


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_vl"])
def test_generation_accepts_every_array_of_a_processor(family: str) -> None:
    subject: Any = subjects(family)[0]
    model, prompts = subject.model, subject.torch_prompts()[0]
    arrays = {name: array.numpy() for name, array in prompts.items() if hasattr(array, "numpy")}
    if family == "llava_onevision":
        arrays.setdefault("batch_num_images", np.ones(len(arrays["input_ids"]), int))
    arrays["mm_token_type_ids"] = np.zeros_like(arrays["input_ids"])
    got = model.generate(**arrays, max_new_tokens=2, eos_token_id=[])
    assert got.sequences.shape[0] == len(arrays["input_ids"])


def test_nested_configurations_are_saved_without_execution_fields(tmp_path: Path) -> None:
    for family in ("llava", "qwen2_vl", "voxtral"):
        subject = subjects(family)[0]
        parts = {name for name in subject.fields if name.endswith("_config")}
        cls = registry.get_config(subject.model_type)
        config: Any = cls(**subject.fields, scan_layers=False)
        first = min(parts)
        config.add_basic_configurations(scan_layers=False)
        part = getattr(config, first)
        part.add_basic_configurations(attn_mechanism="vanilla")
        config.save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        for name in parts:
            assert not {*stored[name]} & {*FIELDS} - {"quantization_config"}, subject.model_type
        assert stored[first]["easydel"] == {"scan_layers": False, "attn_mechanism": "vanilla"}
        again: Any = cls.from_pretrained(tmp_path)
        assert again == config
        assert getattr(again, first).attn_mechanism == "vanilla"
