"""Text halves of multimodal checkpoints: numbers, names of tensors, settings, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, RegistryError
from ed_infra.logging import forget_said
from ed_infra.testing import require_torch
from ed_models import (
    AutoEasyDeLConfig,
    AutoEasyDeLModelForCausalLM,
    AutoEasyDeLModelForEmbedding,
    AutoEasyDeLModelForImageTextToText,
    AutoEasyDeLModelForSequenceClassification,
)
from ed_models.checkpoints import hub
from ed_models.checkpoints.loading import prepare_module
from ed_models.checkpoints.tensor_files import TensorFiles, compute_arrays
from ed_models.checkpoints.text_halves import MODEL_TYPES, text_name, text_tensors
from ed_models.families.siglip import SiglipVisionConfig
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.multimodal_models import (
    GEMMA3,
    GEMMA4,
    GEMMA4_WITHOUT_TOWER,
    MISTRAL3,
    MODELS,
    OTHER_MODELS,
    QWEN3_5_MOE,
    TOWER,
    Multimodal,
    torch_model,
)

ONE = (1, 1, 1, 1, 1)
IDS = np.random.default_rng(0).integers(3, 160, (2, 12)).astype(np.int32)
SLOW = [pytest.param(model, id=str(model), marks=pytest.mark.nightly) for model in OTHER_MODELS]
FAST = [pytest.param(model, id=str(model)) for model in MODELS]
assert {m.model_type for m in MODELS + OTHER_MODELS} == MODEL_TYPES


def logits(model: Any) -> np.ndarray:
    """Return the logits of a torch model for tokens without images."""
    torch = require_torch()
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()).logits.numpy()


def load(directory: Path, **options: Any) -> Any:
    return AutoEasyDeLModelForCausalLM.from_pretrained(directory, sharding_axis_dims=ONE, **options)


def assert_equal(model: Any, other: Any) -> None:
    """Compare all parameters."""
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


def rewrite(directory: Path, target: Path, rename: Any = lambda name: name, **config: Any) -> Path:
    """Copy a checkpoint with other names of tensors and other keys of config.json."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    save_file({rename(name): v for name, v in tensors.items()}, target / "model.safetensors")
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma3") / "model"
    torch_model(GEMMA3, mm_tokens_per_image=4).save_pretrained(directory)
    return directory


#: Prefix in one layout -> prefix in the other layout.
OTHER_LAYOUT = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "language_model.model.",
    "model.text_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def in_other_layout(name: str) -> str:
    """Return the name of a tensor in the layout that the checkpoint does not have."""
    this = next((prefix for prefix in OTHER_LAYOUT if name.startswith(prefix)), None)
    return name if this is None else OTHER_LAYOUT[this] + name.removeprefix(this)


class Pair(NamedTuple):
    """A multimodal model of transformers, its checkpoint, and the text half of this project."""

    model: Multimodal
    logits: np.ndarray
    directory: Path
    ours: Any


@pytest.fixture(scope="module", params=FAST + SLOW)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs, directory = torch_model(request.param), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(directory)
    return Pair(request.param, logits(theirs), directory, load(directory))


@pytest.mark.nightly
def test_text_half_computes_the_logits_of_transformers(pair: Pair) -> None:
    assert pair.ours.config.model_type == pair.model.text_type
    np.testing.assert_allclose(pair.ours(IDS).logits, pair.logits, atol=1e-4)


def test_text_half_saved_alone_is_a_text_checkpoint_of_transformers(
    pair: Pair, tmp_path: Path
) -> None:
    import transformers

    pair.ours.save_pretrained(tmp_path, whole=False)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.model_type == pair.model.text_type
    np.testing.assert_allclose(logits(theirs), pair.logits, atol=1e-6)


def test_both_layouts_of_names_load_the_same_tensors(pair: Pair, tmp_path: Path) -> None:
    other = rewrite(pair.directory, tmp_path / "other", in_other_layout)
    names = [set(load_file(d / "model.safetensors")) for d in (pair.directory, other)]
    assert names[0] != names[1]
    assert_equal(load(other), pair.ours)


#: Prefix of transformers 5.23 -> prefix of transformers 5.0 to 5.5.
EARLY_NAMES = {
    "language_model.model.": "model.language_model.model.",
    "vision_tower.": "model.vision_tower.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def in_early_layout(name: str) -> str:
    """Return the name of a tensor in files of transformers 5.0 to 5.5."""
    prefix = next((prefix for prefix in EARLY_NAMES if name.startswith(prefix)), "")
    return EARLY_NAMES.get(prefix, prefix) + name.removeprefix(prefix)


@pytest.mark.parametrize("task", [TaskType.IMAGE_TEXT_TO_TEXT, TaskType.CAUSAL_LM])
def test_names_of_early_releases_load_whole_and_as_text_half(
    gemma3: Path, tmp_path: Path, task: TaskType
) -> None:
    early = rewrite(gemma3, tmp_path / "early", in_early_layout)
    names = set(load_file(early / "model.safetensors"))
    assert {name.split(".")[0] for name in names} == {"model"}
    hub.check_weights(early, task)


@pytest.mark.parametrize("tower", ["vision_tower.", "model.vision_tower.vision_model."])
def test_tower_of_a_multimodal_checkpoint_loads_alone(gemma3: Path, tower: str) -> None:
    files = TensorFiles.open(gemma3)
    names = {name: name.replace("vision_tower.", tower, 1) for name in files}
    config = SiglipVisionConfig(**TOWER, sharding_axis_dims=ONE)
    tower_class = registry.get_module(TaskType.BASE_VISION, config.model_type)
    prepare_module(tower_class, config, files.rename_tensors(names))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.vision_model.embeddings.class_embedding", None),
    ],
)
def test_name_in_a_text_only_checkpoint(name: str, expected: str | None) -> None:
    assert text_name(name) == expected


def test_tower_beside_text_only_names_is_not_read() -> None:
    """Qwen2-VL of transformers 5.0 to 5.5 has `model.visual` beside `model.layers`."""
    values = {name: np.ones(2, np.float32) for name in ("model.visual.x", "model.norm.weight")}
    files = TensorFiles({}).add_tensors(compute_arrays(TensorFiles({}), values))
    assert list(text_tensors(files, ["model.norm.weight"])) == ["model.norm.weight"]
    assert list(text_tensors(files, ["visual.x", "model.norm.weight"])) == list(values)


def test_settings_of_the_whole_model_override_those_of_the_text(tmp_path: Path) -> None:
    theirs = torch_model(MISTRAL3, tie_word_embeddings=True)  # text_config has False
    theirs.save_pretrained(tmp_path / "model")
    changed = rewrite(tmp_path / "model", tmp_path / "changed", eos_token_id=[7, 9])
    model = load(changed)
    assert model.config.tie_word_embeddings and model.config.eos_token_id == [7, 9]
    np.testing.assert_allclose(model(IDS).logits, logits(theirs), atol=1e-4)


def test_ignored_tensors_are_reported_once(gemma3: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_said()
    load(gemma3)
    load(gemma3)
    (record,) = [r for r in caplog.records if "multimodal" in r.message]
    assert "images are not supported" in record.message
    tower = [n for n in load_file(gemma3 / "model.safetensors") if "language_model" not in n]
    assert f"{len(tower)} tensors (multi_modal_projector" in record.message


def test_text_half_reads_sharded_files(gemma3: Path, tmp_path: Path) -> None:
    theirs = torch_model(GEMMA3, mm_tokens_per_image=4)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_equal(load(tmp_path / "shards"), load(gemma3))


def test_text_half_reads_packed_tensors(gemma3: Path, tmp_path: Path) -> None:
    plain = rewrite(gemma3, tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name, value in tensors.items():
        if name.startswith("language_model") and name.endswith("_proj.weight"):
            codes = (value / 0.5).astype(ml_dtypes.float8_e4m3fn)
            packed |= {name: codes, f"{name}_scale_inv": np.float32([0.5])}
            tensors[name] = codes.astype(np.float32) * np.float32(0.5)
    save_file(tensors, plain / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": None}
    other = rewrite(gemma3, tmp_path / "packed", quantization_config=settings)
    save_file(packed, other / "model.safetensors")
    assert_equal(load(other), load(plain))


@pytest.mark.nightly
def test_unused_keys_of_sharing_layers_are_ignored(tmp_path: Path) -> None:
    torch_model(GEMMA4).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    kinds: list[Any] = [AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForEmbedding]
    before = [kind.from_pretrained(tmp_path, sharding_axis_dims=ONE) for kind in kinds]
    for name in ("k_proj", "v_proj", "k_norm"):
        stored = "model.language_model.layers.{}.self_attn." + f"{name}.weight"
        assert stored.format(5) not in tensors
        tensors[stored.format(5)] = tensors[stored.format(2)].copy()
    save_file(tensors, path)
    for kind, model in zip(kinds, before, strict=True):
        assert_equal(kind.from_pretrained(tmp_path, sharding_axis_dims=ONE), model)


@pytest.mark.nightly
def test_tensors_of_all_experts_load_like_tensors_of_each_expert(tmp_path: Path) -> None:
    theirs = torch_model(QWEN3_5_MOE)
    theirs.save_pretrained(tmp_path / "each")
    joined = {name: value.numpy() for name, value in theirs.state_dict().items()}
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in joined
    all_experts = rewrite(tmp_path / "each", tmp_path / "all")
    save_file(joined, all_experts / "model.safetensors")
    model = load(all_experts)
    assert_equal(model, load(tmp_path / "each"))
    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    saved = TensorFiles.open(tmp_path / "saved")
    assert saved.keys() == joined.keys()
    for name, value in joined.items():
        np.testing.assert_array_equal(saved.read(name), value)
    # A quantized half of a tensor for all experts is not written into this tensor.
    quantized: Any = model.quantize({"dtype": "int8", "pattern": "experts.gate_proj"})
    quantized.save_pretrained(tmp_path / "quantized")
    assert not any("gate_up_proj" in n for n in TensorFiles.open(tmp_path / "quantized"))
    leaves = [jax.tree.leaves(nnx.state(m)) for m in (load(tmp_path / "quantized"), quantized)]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
    classifiers: list[Any] = [
        AutoEasyDeLModelForSequenceClassification.from_pretrained(path, sharding_axis_dims=ONE)
        for path in (all_experts, tmp_path / "each")
    ]
    assert_equal(*classifiers)


@pytest.mark.nightly
def test_text_half_of_a_classifier_keeps_head_and_labels(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    theirs = torch_model(GEMMA3, "AutoModelForSequenceClassification", id2label=labels)
    theirs.save_pretrained(tmp_path)
    ours: Any = AutoEasyDeLModelForSequenceClassification.from_pretrained(
        tmp_path, sharding_axis_dims=ONE
    )
    assert ours.config.id2label == labels
    found = ours(IDS, attention_mask=np.ones_like(IDS)).logits
    np.testing.assert_allclose(found, logits(theirs), atol=1e-4)


def test_task_of_a_checkpoint_without_a_tower_is_that_of_its_text_half(tmp_path: Path) -> None:
    torch_model(GEMMA4_WITHOUT_TOWER).save_pretrained(tmp_path)
    assert AutoEasyDeLConfig.from_pretrained(tmp_path).model_type == "gemma4_text"
    model: Any = hub.from_pretrained(tmp_path, task=TaskType.AUTO_BIND, sharding_axis_dims=ONE)
    assert model.model_task == TaskType.CAUSAL_LM
    with pytest.raises(RegistryError, match="no image-text-to-text module"):
        AutoEasyDeLModelForImageTextToText.from_pretrained(tmp_path)


@pytest.mark.nightly
def test_multimodal_checkpoint_of_a_family_is_loaded_whole_unless_the_task_has_no_images(
    gemma3: Path,
) -> None:
    assert AutoEasyDeLConfig.from_pretrained(gemma3).model_type == "gemma3"
    model: Any = hub.from_pretrained(gemma3, task=TaskType.AUTO_BIND, sharding_axis_dims=ONE)
    assert model.model_task == TaskType.IMAGE_TEXT_TO_TEXT
    np.testing.assert_allclose(model(IDS).logits, load(gemma3)(IDS).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"text_config": None}, CheckpointError, "no text_config with a model_type"),
        ({"text_config": {"hidden_size": 32}}, CheckpointError, "no text_config with a model_type"),
        ({"text_config": {"model_type": "gema3_text"}}, RegistryError, "mean 'gemma3_text'"),
        ({"model_type": ["gemma3"]}, CheckpointError, 'has no "model_type"'),
        ({"model_type": "fuyu"}, RegistryError, "multimodal model that is not registered"),
    ],
)
def test_wrong_config_of_a_multimodal_checkpoint_raises_an_error(
    gemma3: Path, tmp_path: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(rewrite(gemma3, tmp_path / "wrong", **config))


def test_missing_tensor_of_the_language_model_raises_an_error(gemma3: Path, tmp_path: Path) -> None:
    renamed = rewrite(
        gemma3, tmp_path / "wrong", lambda n: n.replace("language_model.model.norm", "norm")
    )
    with pytest.raises(CheckpointError, match=r"missing.*\n.*model\.norm\.weight"):
        load(renamed)
