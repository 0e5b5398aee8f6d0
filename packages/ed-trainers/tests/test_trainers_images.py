"""`contrastive` and `image_classification`: losses of transformers, meshes, empty rows, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_models.auto import (
    AutoEasyDeLModelForImageClassification,
    AutoEasyDeLModelForZeroShotImageClassification,
)
from ed_trainers.arguments import arguments_class
from ed_trainers.methods.contrastive import ContrastiveTrainer
from ed_trainers.methods.image_classification import ImageClassificationTrainer

FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
ONE, EIGHT = (1, 1, 1, 1, 1), (2, 4, 1, 1, 1)
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VISION = {**TOWER, "image_size": 8, "patch_size": 4}
TEXT = {**TOWER, "vocab_size": 64, "max_position_embeddings": 12, "eos_token_id": 63}
ROWS = 16


def written(folder: Path, kind: str) -> Any:
    """Save a tiny model of transformers, and return the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "ViTForImageClassification":
        config = transformers.ViTConfig(**VISION, num_labels=3)
    else:
        of = transformers.CLIPConfig if kind == "CLIPModel" else transformers.SiglipConfig
        config = of(text_config=TEXT, vision_config=VISION)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name == "logit_scale":
                value.fill_(2.0)
            elif name == "logit_bias":
                value.fill_(-3.0)
    model.save_pretrained(folder)
    return model


def batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Return images as a loader returns them, texts and labels."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 60, (rows, 12)).astype(np.int32)
    ids[:, -1] = 63
    pixels = rng.normal(size=(rows, 1, 3, 8, 8)).astype(np.float32)
    labels = rng.integers(0, 3, rows).astype(np.int32)
    return {
        "pixel_values": pixels,
        "input_ids": ids,
        "segment_ids": np.ones_like(ids),
        "labels": labels,
    }


def their_loss(model: Any, made: dict[str, np.ndarray], names: tuple[str, ...], **more: Any):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(made[name]) for name in names}
    tensors = {n: x if x.is_floating_point() else x.long() for n, x in tensors.items()}
    tensors["pixel_values"] = torch.tensor(made["pixel_values"][:, 0])
    with torch.no_grad():
        return float(model(**tensors, **more).loss)


def contrastive(folder: Path, data: Any, dims: tuple[int, ...] = ONE, **more: Any) -> Any:
    model = AutoEasyDeLModelForZeroShotImageClassification.from_pretrained(
        folder, sharding_axis_dims=dims, **FLOAT32
    )
    options = {"total_batch_size": ROWS, "save_directory": str(folder / "run"), **more}
    arguments = arguments_class("contrastive")(**options)
    return ContrastiveTrainer(arguments, model, data, data)


@pytest.mark.torch
@pytest.mark.daily("CLIPModel")
@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_contrastive_loss_equals_transformers(kind: str, tmp_path: Path) -> None:
    made = batch()
    want = their_loss(written(tmp_path, kind), made, ("input_ids",), return_loss=True)
    found = contrastive(tmp_path, [made]).evaluate()
    assert found["eval_loss"] == pytest.approx(want, abs=1e-5)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_batch_over_eight_devices_has_loss_and_gradient_of_one_device(
    kind: str, tmp_path: Path
) -> None:
    written(tmp_path, kind)
    first, losses = [], []
    for dims in (ONE, EIGHT):
        directory = tmp_path / f"run{len(losses)}"
        options = {"max_training_steps": 1, "learning_rate": 1e-4, "log_steps": 1}
        trainer = contrastive(tmp_path, [batch()], dims, save_directory=str(directory), **options)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        first.append(json.loads((directory / "metrics.jsonl").read_text().splitlines()[0]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], abs=1e-5)
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_empty_rows_do_not_change_contrastive_loss(kind: str, tmp_path: Path) -> None:
    written(tmp_path, kind)
    made = batch()
    padded = {name: np.concatenate([array, array * 0]) for name, array in made.items()}
    found = [contrastive(tmp_path, [data]).evaluate()["eval_loss"] for data in (made, padded)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.torch
def test_image_classification_loss_equals_transformers(tmp_path: Path) -> None:
    made = batch()
    want = their_loss(written(tmp_path, "ViTForImageClassification"), made, ("labels",))
    model = AutoEasyDeLModelForImageClassification.from_pretrained(
        tmp_path, sharding_axis_dims=ONE, **FLOAT32
    )
    arguments = arguments_class("image_classification")(total_batch_size=ROWS)
    found = ImageClassificationTrainer(arguments, model, None, [made]).evaluate()
    assert found["eval_loss"] == pytest.approx(want, abs=1e-5)
    assert 0 <= found["eval_accuracy"] <= 1


def test_contrastive_rejects_microbatches() -> None:
    with pytest.raises(ValueError, match="only within a microbatch"):
        arguments_class("contrastive")(total_batch_size=4, gradient_accumulation_steps=2)
