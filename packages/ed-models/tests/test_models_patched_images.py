"""Vision-language models over packed patches: text halves, positions in caches, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.body.image_rows import rows_of_images
from ed_models.checkpoints import hub
from ed_models.conformance import Subject
from safetensors.numpy import load_file, save_file

from tests.conformance.cases import subjects

ONE = (1, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def subject() -> Any:
    return subjects("qwen2_vl")[0]


@pytest.fixture(scope="module")
def saved(subject: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ed_infra import registry

    folder = tmp_path_factory.mktemp("qwen2_vl")
    config = registry.get_config("qwen2_vl")(**subject.fields, sharding_axis_dims=ONE)
    subject.module_class.create(config, seed=1).save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_text_half_of_a_checkpoint_has_the_numbers_of_the_whole_model(
    subject: Subject, saved: Path
) -> None:
    whole: Any = hub.from_pretrained(saved, task=TaskType.AUTO_BIND, sharding_axis_dims=ONE)
    half = AutoEasyDeLModelForCausalLM.from_pretrained(saved, sharding_axis_dims=ONE)
    assert whole.config.model_type == "qwen2_vl" and half.config.model_type == "qwen2_vl_text"
    ids = subject.ids[:, :8] % 100
    np.testing.assert_allclose(half(ids).logits, whole(ids).logits, atol=1e-6)


@pytest.mark.nightly
def test_both_layouts_of_names_load_the_same_tensors(saved: Path, tmp_path: Path) -> None:
    names = {"visual.": "model.visual.", "model.": "model.language_model."}
    tensors = {}
    for name, value in load_file(saved / "model.safetensors").items():
        old = next((old for old in names if name.startswith(old)), "")
        tensors[names.get(old, "") + name.removeprefix(old)] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    for task in ("image-text-to-text", "causal-language-model"):
        models: list[Any] = [
            hub.from_pretrained(path, task=task, sharding_axis_dims=ONE)
            for path in (saved, tmp_path)
        ]
        ids = np.arange(8)[None]
        np.testing.assert_array_equal(*(model(ids).logits for model in models))


@pytest.mark.nightly
def test_second_turn_with_images_continues_the_positions_of_the_first(subject: Any) -> None:
    model, row = subject.model, slice(0, 1)
    images = {name: x[row] for name, x in subject.images.items()}
    ids, grids = subject.ids[row], images["image_grid_thw"]
    whole = model(ids, **images)
    first = int(grids[0, 0].prod())
    cut = int(np.flatnonzero(ids[0] == subject.image_token)[first // 4 - 1]) + 2
    turns = [
        (ids[:, :cut], images["pixel_values"][:, :first], grids[:, :1]),
        (ids[:, cut:], images["pixel_values"][:, first:], grids[:, 1:]),
    ]
    cache, parts = model.init_cache(1, 32), []
    for tokens, pixels, grid in turns:
        out = model.decode(tokens, pixel_values=pixels, image_grid_thw=grid, past_key_values=cache)
        cache = out.past_key_values
        parts.append(np.asarray(out.logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole.logits, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "arrays", "message"),
    [
        ([4], {"pixel_values": np.zeros((16, 6))}, "pass both"),
        (
            [4],
            {"pixel_values": np.zeros((16, 6)), "image_grid_thw": np.zeros((1, 1, 3), int)},
            "with a row for each text",
        ),
        (
            [5],
            {"pixel_values": np.zeros((16, 6)), "image_grid_thw": np.array([[1, 4, 4]])},
            "row 0 has 5 image tokens, 16 patches .* 4 features",
        ),
        (
            [4],
            {"pixel_values": np.zeros((12, 6)), "image_grid_thw": np.array([[1, 4, 4]])},
            "row 0 has 4 image tokens, 12 patches",
        ),
    ],
)
def test_images_that_contradict_their_tokens_are_rejected(tokens, arrays, message) -> None:
    placeholders = np.arange(8) < np.array(tokens)[:, None]
    with pytest.raises(ConfigError, match=message):
        rows_of_images(placeholders, arrays, merge=2)


def test_images_of_a_processor_are_assigned_to_the_rows_of_their_tokens() -> None:
    grids = np.array([[1, 2, 4], [1, 2, 2], [1, 4, 4]])
    pixels = np.arange(28)[:, None] * np.ones((1, 3))
    placeholders = np.arange(8) < np.array([[3], [0], [4]])
    rows = rows_of_images(placeholders, {"pixel_values": pixels, "image_grid_thw": grids}, merge=2)
    assert rows["image_grid_thw"].tolist() == [
        [[1, 2, 4], [1, 2, 2]],
        [[0, 0, 0]] * 2,
        [[1, 4, 4], [0, 0, 0]],
    ]
    assert rows["pixel_values"].shape == (3, 64, 3)
    assert rows["pixel_values"][0, :13, 0].tolist() == [*range(12), 0]
    assert rows["pixel_values"][2, :17, 0].tolist() == [*range(12, 28), 0]
