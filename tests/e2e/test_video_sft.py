"""LoRA on chats with videos from run files: the loss of transformers, and a lower loss after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_infra.testing import require_torch

from tests.image_checkpoints import save_checkpoint
from tests.image_runs import trained

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and chats with 1 or 2 videos and an image."""
    path = tmp_path_factory.mktemp("videos")
    save_checkpoint(request.param, path / "model")
    rows = []
    for number in range(8):
        media = [{"type": "video"}] * (1 + number % 2)
        names = []
        for place in range(len(media)):
            names.append(f"{number}-{place}.gif")
            levels = np.random.default_rng(10 * number + place).integers(0, 255, (8, 4, 4, 3))
            frames = [Image.fromarray(x.astype(np.uint8)).resize((36, 28)) for x in levels]
            milliseconds = (250, 500, 1000)[number % 3]
            frames[0].save(
                path / names[-1], save_all=True, append_images=frames[1:], duration=milliseconds
            )
        row: dict[str, Any] = {"videos": names}
        if number % 3 == 0:
            Image.new("RGB", (20, 30), (30 * number, 7, 99)).save(path / f"{number}.png")
            media, row["images"] = [*media[:1], {"type": "image"}, *media[1:]], [f"{number}.png"]
        # transformers requires other tokens between two videos.
        parts = [part for medium in media for part in (medium, {"type": "text", "text": " and"})]
        parts.append({"type": "text", "text": f"what {number}"})
        answer = "a cat sat" if number % 2 else "the dog ran"
        row["messages"] = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        rows.append(row)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def document(folder: Path, name: str, *, packed: bool, **trainer: Any) -> dict[str, Any]:
    rows = {"data_files": str(folder / "rows.jsonl"), "content_field": "messages"}
    packing = {"pack_tokens": True, "pack_seq_length": 512} if packed else {}
    return {
        "model": {"name_or_path": str(folder / "model"), "task": "image-text-to-text"},
        "lora": {"rank": 4, "targets": ["language_model.layers"]},
        "mixture": {
            "prefetch_workers": 0,
            "informs": [rows],
            "tokenization": {"max_length": 256},
            **packing,
        },
        "trainer": {
            "trainer_type": "sft",
            "total_batch_size": 1 if packed else 4,
            "max_training_steps": 6,
            "learning_rate": 3e-2,
            "log_steps": 1,
            "use_tensorboard": False,
            "save_directory": str(folder / name),
            **trainer,
        },
        "actions": ["train"],
    }


def compute_torch_loss(folder: Path, batch: dict[str, np.ndarray]) -> float:
    """Return the loss of transformers for the documents of a batch, one call for each."""
    torch = require_torch()
    import transformers

    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder / "model").eval()
    config, total, count = model.config, 0.0, 0
    for row, segments in enumerate(batch["segment_ids"]):
        first_patch = first_grid = 0
        grids = batch["image_grid_thw"][row]
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            ids = batch["input_ids"][row][here]
            kinds = np.where(ids == config.image_token_id, 1, 0)
            kinds = np.where(ids == config.video_token_id, 2, kinds)
            arrays: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
            place, starts = 0, []
            tokens = kinds[kinds > 0]
            while place < len(tokens):
                grid, patches = grids[first_grid], int(grids[first_grid].prod())
                pixels = batch["pixel_values"][row, first_patch : first_patch + patches]
                token = int(tokens[place])
                times = batch.get("image_times")
                begins = times is None or times[row, first_grid] == 0
                starts += [first_grid] if token == 2 and begins else []
                names = NAMES[:2] if token == 1 else NAMES[2:]
                if token == 2 and not begins:
                    arrays[names[1]][-1] = arrays[names[1]][-1] + np.array([1, 0, 0])
                else:
                    arrays[names[1]].append(grid)
                arrays[names[0]].append(pixels)
                place, first_patch, first_grid = (
                    place + patches // 4,
                    first_patch + patches,
                    (first_grid + 1),
                )
            inputs = {
                "input_ids": torch.tensor(ids)[None].long(),
                "mm_token_type_ids": torch.tensor(kinds)[None],
                "labels": torch.tensor(batch["labels"][row][here])[None].long(),
            }
            for name, parts in arrays.items():
                if parts and name.endswith("thw"):
                    inputs[name] = torch.tensor(np.stack(parts)).long()
                elif parts:
                    inputs[name] = torch.tensor(np.concatenate(parts))
            if starts and "image_times" in batch:
                # Two positions for each second; a frame of a patch lasts as long as two frames.
                seconds = [max(int(batch["image_times"][row, at + 1]) - 1, 0) / 2 for at in starts]
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
            with torch.no_grad():
                loss = model(**inputs).loss
            predicted = int((batch["labels"][row][here][1:] != -100).sum())
            total, count = total + float(loss) * predicted, count + predicted
    return total / count


NAMES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("packed", [False, True])
def test_lora_on_videos_has_the_loss_of_transformers(folder: Path, packed: bool) -> None:
    made = document(folder, f"packed-{packed}", packed=packed)
    (folder / "loader.yaml").write_text(yaml.safe_dump(made))
    loader: Any = eLargeModel.from_yaml(str(folder / "loader.yaml")).build_dataset()
    expected = compute_torch_loss(folder, loader.batch_at(0))
    metrics, _ = trained(made)
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert losses[0] == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < losses[0]


@pytest.mark.nightly
def test_kept_features_of_frames_do_not_change_the_losses(folder: Path) -> None:
    losses = []
    for name, options in (("plain", {}), ("kept", {"image_feature_cache_gib": 0.1})):
        metrics, _ = trained(document(folder, name, packed=False, **options))
        losses.append([row["loss"] for row in metrics if "loss" in row])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)
