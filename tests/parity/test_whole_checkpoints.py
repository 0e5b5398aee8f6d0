"""A text-only fine-tune of a checkpoint with further parts is the whole checkpoint again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ed_elarge.certify.adapter_checks import untouched_tensors_are_equal
from ed_elarge.certify.outcome import Failed
from ed_elarge.certify.subject import CertifiedModel
from ed_infra.specs import LoraSpec
from ed_infra.testing import require_torch
from ed_models import AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForImageTextToText
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.convert import convert
from safetensors.numpy import load_file, save_file

from tests.conformance.cases import subjects
from tests.multimodal_models import GEMMA3, MODELS, OTHER_MODELS, Multimodal, torch_model

ONE = (1, 1, 1, 1, 1)
MTP = "mtp.layers.0.input_layernorm.weight"
#: Families that are loaded with their towers -> a tensor that they copy, and do not compute.
WITH_TOWERS = {
    "aya_vision": None,
    "cohere2_vision": None,
    "deepseek_vl": None,
    "exaone4_5": MTP,
    "glm46v": None,
    "glm4v_moe": "model.language_model.layers.46.input_layernorm.weight",
    "lighton_ocr": None,
    "llava_next_video": None,
    "qwen3_5": MTP,
    "qwen3_5_moe": MTP,
    "vipllava": None,
}
#: Parts of the names of tensors of a language model.
TEXT_NAMES = "language_model", "text_model", "model.layers."
FILES = ("LICENSE", "modeling_mine.py", "preprocessor_config.json", "chat_template.jinja")


class Rows:
    """A loader that returns the same rows at each step."""

    steps_per_epoch = 4

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(0).integers(3, 128, (8, 16)).astype(np.int32)
        places = np.broadcast_to(np.arange(16, dtype=np.int32), ids.shape)
        one = np.ones_like(ids)
        return {"input_ids": ids, "labels": ids, "segment_ids": one, "position_ids": places}


def save_checkpoint(theirs: Any, directory: Path, extra: str | None = MTP) -> None:
    """Save a model of transformers with a further tensor and further files.

    Args:
        theirs: the model.
        directory: the folder.
        extra: name of the further tensor; None = no tensor.
    """
    theirs.save_pretrained(directory)
    path = directory / "model.safetensors"
    values = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    tensors = {} if extra is None else {extra: values}
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    for name in FILES:
        (directory / name).write_text("{}")


def train(directory: Path, run: Path, *, adapters: bool = True, whole: bool = False) -> None:
    """Train the language model of a checkpoint for one step on text.

    Args:
        directory, run: folders of the checkpoint and of the run.
        adapters: whether adapters are trained, instead of all tensors of the language model.
        whole: whether the model is loaded with its vision tower, whose tensors have no adapters.
    """
    auto: Any = AutoEasyDeLModelForImageTextToText if whole else AutoEasyDeLModelForCausalLM
    model = auto.from_pretrained(directory, sharding_axis_dims=ONE)
    if adapters:
        model = model.apply_lora(
            LoraSpec(rank=2, targets="language_model.layers" if whole else None)
        )
    arguments = SFTArguments(
        save_directory=str(run),
        total_batch_size=8,
        max_training_steps=1,
        learning_rate=1e-2,
        warmup_steps=0,
        use_tensorboard=False,
    )
    SFTTrainer(arguments, model=model, train_dataset=Rows()).train()


CASES = [
    *(pytest.param(model, id=str(model)) for model in (*MODELS, *OTHER_MODELS)),
    *(pytest.param(model_type, id=f"{model_type}, with tower") for model_type in WITH_TOWERS),
]


@pytest.mark.nightly
@pytest.mark.parametrize("model", CASES)
def test_text_fine_tune_of_a_multimodal_checkpoint_is_a_whole_checkpoint_of_transformers(
    model: Multimodal | str, tmp_path: Path
) -> None:
    torch = require_torch()
    base = tmp_path / "base"
    if whole := isinstance(model, str):
        theirs, extra = subjects(model)[0].torch_model, WITH_TOWERS[model]
    else:
        theirs, extra = torch_model(model), MTP
    save_checkpoint(theirs, base, extra)
    train(base, tmp_path / "run", whole=whole)
    trained = tmp_path / "run/model"
    files, saved = TensorFiles.open(base), TensorFiles.open(trained)
    assert saved.keys() == files.keys()
    assert {path.name for path in base.iterdir()} <= {path.name for path in trained.iterdir()}
    equal = {n for n in files if np.array_equal(files.read_bytes(n), saved.read_bytes(n))}
    assert extra in {*equal, None} and len(equal) < len(files)
    assert all(any(part in n for part in TEXT_NAMES) for n in files.keys() - equal)
    reloaded, info = type(theirs).from_pretrained(trained, output_loading_info=True)
    assert not info["missing_keys"] and {*info["unexpected_keys"]} <= {extra}
    before, after = theirs.state_dict(), reloaded.state_dict()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and all(any(part in n for part in TEXT_NAMES) for n in changed)
    configs = [json.loads((d / "config.json").read_text()) for d in (base, trained)]
    for config in configs:
        del config["text_config"]
        for part in (config, config.get("vision_config") or {}):
            part.pop("easydel", None)  # the mesh of the run
    assert configs[0] == configs[1]
    subject = CertifiedModel(tmp_path / "run", base)
    assert untouched_tensors_are_equal(subject).status == "passed"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `base` and `run` of a model that was trained without adapters."""
    folder = tmp_path_factory.mktemp("trained")
    save_checkpoint(torch_model(GEMMA3), folder / "base")
    train(folder / "base", folder / "run", adapters=False)
    return folder


@pytest.mark.nightly
def test_checkpoint_of_a_run_becomes_the_whole_checkpoint(trained: Path, tmp_path: Path) -> None:
    (checkpoint,) = (trained / "run/checkpoints").glob("[0-9]*")
    convert(checkpoint, tmp_path / "model")
    files, saved = (TensorFiles.open(d) for d in (trained / "run/model", tmp_path / "model"))
    assert saved.keys() == files.keys()
    for name in files:
        np.testing.assert_array_equal(saved.read_bytes(name), files.read_bytes(name))
    assert (tmp_path / "model/LICENSE").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["lost", "changed byte", "other dtype", "none"])
@pytest.mark.parametrize("name", [MTP, "multi_modal_projector.mm_input_projection_weight"])
def test_certificate_finds_lost_and_changed_tensors(
    trained: Path, tmp_path: Path, fault: str, name: str
) -> None:
    folder = shutil.copytree(trained / "run/model", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    if fault == "lost":
        del tensors[name]
    elif fault == "changed byte":
        tensors[name].reshape(-1).view(np.uint8)[0] ^= 1
    elif fault == "other dtype":
        tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    subject = CertifiedModel(folder, trained / "base")
    if fault == "none":
        assert untouched_tensors_are_equal(subject).status == "passed"
        return
    with pytest.raises(Failed, match=name):
        untouched_tensors_are_equal(subject)
