"""Tensors that a model does not compute: copied when the model is saved, and errors of their
files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models import AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForSequenceClassification
from ed_models.checkpoints.carried import CarriedTensors
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.text_halves import restore_text_half
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.weights.rules import STANDARD, carry, ignore, renamed
from flax import nnx
from safetensors.numpy import load_file, save_file

ONE = (1, 1, 1, 1, 1)
#: Layers for further tokens and a head of a reward: parts that Llama does not compute.
ADDED: dict[str, np.ndarray] = {
    "mtp.fc.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "mtp.layers.0.norm.weight": np.full((5,), np.nan, ml_dtypes.bfloat16),
    "mtp.codes": np.arange(7, dtype=np.uint8),
    "mtp.empty": np.zeros((0, 4), np.float32),
    "v_head.summary.weight": np.ones((1, 32), np.float32),
}


def load(directory: Path, **options: Any) -> Any:
    return AutoEasyDeLModelForCausalLM.from_pretrained(directory, sharding_axis_dims=ONE, **options)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with further tensors, and files that only other programs read."""
    fields = tiny_llama(num_hidden_layers=1, sharding_axis_dims=ONE)
    del fields["model_type"]
    directory, config = tmp_path_factory.mktemp("first"), LlamaConfig(**fields)
    model = nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
    shapes = weight_map(LlamaForCausalLM, nnx.state(model), config).hf_shapes
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    config.replace(architectures=["LlamaForCausalLM"]).save_pretrained(directory)
    save_file({**tensors, **ADDED}, directory / "model.safetensors", {"format": "pt"})
    for name in ("LICENSE", "modeling_mine.py", "video_preprocessor_config.json", "tekken.json"):
        (directory / name).write_text("{}")
    adapter = directory / "speech-lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"lora_A": np.ones(3, np.float32)}, adapter / "adapter_model.safetensors")
    return directory


@pytest.fixture
def source(first: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first, tmp_path / "source")


def assert_copied(source: Path, target: Path) -> None:
    """Compare names, formats and bytes of the further tensors."""
    files, saved = TensorFiles.open(source), TensorFiles.open(target)
    assert saved.keys() == files.keys()
    for name in ADDED:
        assert (saved[name].format, saved[name].shape) == (files[name].format, files[name].shape)
        np.testing.assert_array_equal(saved.read_bytes(name), files.read_bytes(name))


def test_saved_model_has_all_files_of_its_checkpoint(source: Path, tmp_path: Path) -> None:
    model = load(source)
    model.save_pretrained(tmp_path / "new", max_shard_size="20KB", dtype="bfloat16")
    assert_copied(source, tmp_path / "new")
    new_files = {str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*")}
    for path in source.rglob("*"):
        assert str(path.relative_to(source)) in new_files | {"model.safetensors"}
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() >= ADDED.keys()
    assert index["metadata"]["total_size"] == sum(
        entry.stop - entry.start for entry in TensorFiles.open(tmp_path / "new").values()
    )
    model.save_pretrained(tmp_path / "alone", whole=False)
    assert not ADDED.keys() & TensorFiles.open(tmp_path / "alone").keys()
    assert not (tmp_path / "alone/LICENSE").exists()


@pytest.mark.nightly
def test_merged_resized_and_quantized_models_are_saved_with_the_tensors_of_their_checkpoint(
    source: Path, tmp_path: Path
) -> None:
    model = load(source)
    models = {
        "merged": model.apply_lora(LoraSpec(rank=2)).unwrap_lora_to_layers(),
        "resized": model.resize_token_embeddings(200),
        "dequantized": model.quantize({"dtype": "int8"}).dequantize(),
        "unrolled": model.to_layout("leaves"),
    }
    for name, changed in models.items():
        changed.save_pretrained(tmp_path / name)
        assert_copied(source, tmp_path / name)
    quantized = model.quantize({"dtype": "int8"})
    quantized.save_pretrained(tmp_path / "quantized")
    assert TensorFiles.open(tmp_path / "quantized").keys() >= ADDED.keys()
    load(tmp_path / "quantized").dequantize().save_pretrained(tmp_path / "plain")
    assert_copied(source, tmp_path / "plain")


def test_classifier_of_a_language_model_does_not_carry_its_other_parts(source: Path) -> None:
    model: Any = AutoEasyDeLModelForSequenceClassification.from_pretrained(
        source, sharding_axis_dims=ONE, config_kwargs={"num_labels": 2}
    )
    assert model.carried_tensors is None


def change_byte(source: Path) -> None:
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "model.safetensors").write_bytes(data)


def replace_model(source: Path) -> None:
    path = source / "model.safetensors"
    save_file({**load_file(path), "mtp.fc.weight": np.ones(3, np.float32)}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda source: shutil.rmtree(source), "model.safetensors is not there any more"),
        (change_byte, "model.safetensors has changed since the model was loaded"),
        (replace_model, "model.safetensors has changed since the model was loaded"),
    ],
)
def test_changed_file_raises_an_error_that_names_the_file_and_ways_out(
    source: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    model = load(source)
    damage(source)
    with pytest.raises(CheckpointError, match=words) as error:
        model.save_pretrained(tmp_path / "new")
    assert "load the model again" in str(error.value) and "whole=False" in str(error.value)
    assert not (tmp_path / "new").exists()


def test_reference_of_a_run_accepts_copied_files_and_refuses_other_bytes(
    source: Path, tmp_path: Path
) -> None:
    model = load(source)
    reference = json.loads(json.dumps(model.carried_tensors.to_reference()))
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(CheckpointError, match="has changed"):
        model.save_pretrained(tmp_path / "new")
    model.carried_tensors = CarriedTensors.from_reference(reference)
    model.save_pretrained(tmp_path / "new")
    assert_copied(source, tmp_path / "new")
    change_byte(source)
    with pytest.raises(CheckpointError, match="has changed"):
        model.save_pretrained(tmp_path / "other")


def test_model_is_saved_into_its_own_directory_twice(source: Path, first: Path) -> None:
    model = load(source)
    for _ in range(2):
        model.save_pretrained(source, max_shard_size="20KB")
        assert_copied(first, source)


def test_kept_tensors_are_copied_and_ignored_ones_are_not() -> None:
    rules = renamed({"layers": "h"}, carry("mtp.{path}"), *STANDARD, ignore("twice.{path}"))
    weights = WeightMap(rules, {"model.norm.weight": (2,)})
    assert weights.ignores("mtp.norm.weight") and weights.copies("mtp.norm.weight")
    assert weights.ignores("twice.weight") and not weights.copies("twice.weight")


def test_settings_of_the_whole_model_change_with_its_text_half() -> None:
    stored = {
        "model_type": "whole",
        "architectures": ["WholeForConditionalGeneration"],
        "tie_word_embeddings": True,
        "eos_token_id": [1, 2],
        "vocab_size": 8,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "fp8"},
        "vision_config": {"depth": 1},
        "text_config": {"model_type": "text", "vocab_size": 8, "eos_token_id": 1},
    }
    text = {"model_type": "text", "vocab_size": 9, "dtype": "bfloat16", "architectures": ["Text"]}
    fields = {**text, "tie_word_embeddings": False, "eos_token_id": [1, 2]}
    new = restore_text_half(stored, {**text, "eos_token_id": [1, 2]}, fields)
    changes = {"tie_word_embeddings": False, "vocab_size": 9, "torch_dtype": "bfloat16"}
    expected = {**stored, **changes}
    del expected["quantization_config"]
    new_text = {"model_type": "text", "vocab_size": 9, "dtype": "bfloat16", "eos_token_id": 1}
    assert new == {**expected, "text_config": new_text}
