"""`image_feature_cache_gib`: outputs of a frozen vision encoder are kept; losses do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_infra.errors import ConfigError

from tests.image_checkpoints import save_checkpoint

Image = pytest.importorskip("PIL.Image")

#: Tiles of one size, tiles without padding, patches with further features, patches with positions
#: on three axes, tokens that attend to later ones, and patches with tokens between them.
FAMILIES = ("internvl", "llava_next", "qwen3_vl_moe", "glm4v", "gemma3", "llava")
#: Rules that freeze the tower and the projector: only the language model is trained.
FROZEN = [["language_model|lm_head", True]]
ROWS, OPTION = 12, "image_feature_cache_gib"
SIDES = ("chosen", "rejected")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a tiny model of a family, with chats, once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_checkpoint(family, made[family] / "model")
            write_rows(made[family])
        return made[family]

    return checkpoint


def write_rows(folder: Path) -> None:
    """Write chats with 0, 1 and 2 images. Rows share images: 7 files have 6 different contents."""
    for name in range(7):
        size, color = (24 + 9 * (name % 6), 60 - 5 * (name % 6)), (40 * (name % 6), 99, 7)
        Image.new("RGB", size, color).save(folder / f"{name}.png")
    chats, pairs = [], []
    for number in range(ROWS):
        names = [str(folder / f"{(number + k) % 7}.png") for k in range(number % 3)]
        parts = [*[{"type": "image"}] * len(names), {"type": "text", "text": f"what {number}"}]
        question = {"role": "user", "content": parts}
        texts = "a cat" if number % 2 else "the dog", "no"
        answers = [[{"role": "assistant", "content": [{"type": "text", "text": t}]}] for t in texts]
        chats.append({"messages": [question, *answers[0]], "images": names})
        row = {"prompt": [question], "images": names, **dict(zip(SIDES, answers, strict=True))}
        pairs.append(row)
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def document(folder: Path, run: Path, method: str = "sft", **trainer: Any) -> dict[str, Any]:
    """Return a run file: three passes over the rows with one image or more steps."""
    data = {"data_files": str(folder / ("chats.jsonl" if method == "sft" else "pairs.jsonl"))}
    mixture: dict[str, Any] = {"prefetch_workers": 0, "informs": [data]}
    if method == "sft":
        data["content_field"] = "messages"
        mixture |= {"pack_tokens": True, "pack_seq_length": 192, "eval_fraction": 0.2}
    else:
        mixture["tokenization"] = {"max_length": 128}
    return {
        "model": {"name_or_path": str(folder / "model"), "task": "image-text-to-text"},
        "mixture": mixture,
        "trainer": {
            "trainer_type": method,
            "total_batch_size": 2,
            **({} if "max_training_steps" in trainer else {"num_train_epochs": 3}),
            "learning_rate": 1e-3,
            "weight_decay": 0.0,
            "log_steps": 1,
            "use_tensorboard": False,
            "progress_bar_type": "none",
            "trainable_rules": FROZEN,
            "save_directory": str(run),
            **trainer,
        },
        "actions": ["train"],
    }


def trainer_of(made: dict[str, Any]) -> Any:
    file = Path(made["trainer"]["save_directory"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(made))
    return eLargeModel.from_yaml(str(file)).build_trainer()


def rows_of(trainer: Any) -> list[dict[str, Any]]:
    """Train, and return the rows of the metrics."""
    trainer.train()
    directory = Path(trainer.arguments.save_directory)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def calls_of(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each call of the model's encoder, traced or not, adds its rows."""
    images, shapes = trainer.method.images, []
    encode = images._encode

    def counted(state: Any, inputs: Any) -> Any:
        shapes.append(inputs["pixel_values"].shape)
        return encode(state, inputs)

    monkeypatch.setattr(images, "_encode", counted)
    traced = type(trainer.method.learner).encode

    def one_item(self: Any, inputs: Any, **more: Any) -> Any:
        assert len(inputs["pixel_values"]) == 1, "a step encodes its images"
        return traced(self, inputs, **more)

    monkeypatch.setattr(type(trainer.method.learner), "encode", one_item)
    return shapes


@pytest.mark.nightly
@pytest.mark.proves("image_feature_cache_gib")
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_equal_those_without_kept_features_and_images_are_encoded_once(
    family: str, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    wanted = rows_of(trainer_of(document(folder, tmp_path / "without")))
    trainer = trainer_of(document(folder, tmp_path / "with", **{OPTION: 0.01}))
    calls = calls_of(trainer, monkeypatch)
    found = rows_of(trainer)
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (found, wanted)]
    per_epoch = trainer.feed.steps_per_epoch
    assert len(losses[0]) == 3 * per_epoch
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)
    evaluations = [
        [row["eval_loss"] for row in rows if "eval_loss" in row][-1] for rows in (found, wanted)
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5)
    assert losses[0][-1] < losses[0][0]
    # Tiles are items: an image of a family with tiles has several.
    encoded = [int(row["encoded_images"]) for row in found if "loss" in row]
    assert 3 <= encoded[per_epoch - 1] == encoded[-1] <= len(calls)
    assert len(calls) == trainer.method.images.encoded
    programs = len(set(calls))
    assert trainer.method.images._cache.nbytes > 0
    assert programs <= 3, "images of one bucket share a program"


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["internvl", "glm4v"])
def test_preferences_read_kept_features(
    family: str, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the model before training, which has the same encoder."""
    folder = checkpoints(family)
    wanted = rows_of(trainer_of(document(folder, tmp_path / "without", "dpo")))
    trainer = trainer_of(document(folder, tmp_path / "with", "dpo", **{OPTION: 0.01}))
    calls_of(trainer, monkeypatch)
    found = rows_of(trainer)
    for name in ("loss", "rewards/margins", "logps/chosen"):
        values = [[row[name] for row in rows if name in row] for rows in (found, wanted)]
        np.testing.assert_allclose(*values, atol=1e-4 if name == "logps/chosen" else 1e-5)


@pytest.mark.nightly
def test_resumed_run_with_kept_features_equals_uninterrupted_run(
    checkpoints: Any, tmp_path: Path
) -> None:
    folder, option = checkpoints("internvl"), {OPTION: 0.01}
    whole = rows_of(
        trainer_of(document(folder, tmp_path / "whole", max_training_steps=6, **option))
    )
    first = document(folder, tmp_path / "parts", max_training_steps=3, save_steps=3, **option)
    rows_of(trainer_of(first))
    rest = document(folder, tmp_path / "parts", max_training_steps=6, save_steps=3, **option)
    rows = rows_of(trainer_of(rest))
    losses = [[row["loss"] for row in of if "loss" in row] for of in (rows, whole)]
    assert losses[0] == losses[1]


@pytest.mark.nightly
def test_small_budget_changes_no_loss(checkpoints: Any, tmp_path: Path) -> None:
    losses, encoded = [], []
    for name, gib in (("large", 0.01), ("small", 1e-6)):
        trainer = trainer_of(document(checkpoints("internvl"), tmp_path / name, **{OPTION: gib}))
        losses.append([row["loss"] for row in rows_of(trainer) if "loss" in row])
        encoded.append(trainer.method.images.encoded)
        cache = trainer.method.images._cache
        assert 0 < cache.nbytes <= cache.most == int(gib * 2**30)
    assert losses[0] == losses[1]
    assert encoded[0] < encoded[1], "dropped outputs are computed again"


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["vision_tower", "multi_modal_projector"])
def test_trained_encoder_is_refused(part: str, checkpoints: Any, tmp_path: Path) -> None:
    folder, option = checkpoints("internvl"), {OPTION: 0.01}
    rules = {"trainable_rules": [[part, True], *FROZEN]}
    with pytest.raises(ConfigError, match=f"(?s)training changes .*{part}.*trainable_rules"):
        trainer_of(document(folder, tmp_path / "rules", **option, **rules))
    made = document(folder, tmp_path / "lora", **option, trainable_rules=[])
    made["lora"] = {"rank": 2, "targets": [part]}
    with pytest.raises(ConfigError, match=f"(?s)training changes .*{part}.*adapters"):
        trainer_of(made)
    made["lora"]["targets"] = ["language_model.layers"]
    made["trainer"]["save_directory"] = str(tmp_path / "language")
    assert trainer_of(made).method.images is not None


@pytest.mark.nightly
def test_reference_with_another_encoder_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    folder = checkpoints("internvl")
    save_checkpoint("internvl", tmp_path / "reference", seed=6)
    made = document(folder, tmp_path / "run", "dpo", **{OPTION: 0.01})
    made["reference_model"] = {"name_or_path": str(tmp_path / "reference")}
    with pytest.raises(ConfigError, match="encoder of the frozen model 'reference' differs"):
        trainer_of(made)
    made["reference_model"] = {"name_or_path": str(folder / "model")}
    assert trainer_of(made).method.images is not None
