"""SFT with images from run files: the loss of TRL, improvement on held-out chats, resume."""

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

FAMILY, FEATURES, ROWS = "internvl", 4, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and chats with 0, 1 and 2 images between parts of text."""
    path = tmp_path_factory.mktemp("sft")
    save_checkpoint(FAMILY, path / "model")
    rows = []
    for number in range(ROWS):
        names, parts = [], [{"type": "text", "text": f"what {number}"}]
        for place in range(number % 3):
            names.append(str(path / f"{number}-{place}.png"))
            size = (20 + 9 * place, 60 - number)
            Image.new("RGB", size, (15 * number, 255 - 15 * number, 7)).save(names[-1])
            parts += [{"type": "image"}, {"type": "text", "text": " and"}]
        answer = [{"type": "text", "text": "a cat sat" if number % 2 else "the dog ran"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": names})
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def document(folder: Path, name: str, steps: int, **trainer: Any) -> dict[str, Any]:
    rows = {"data_files": str(folder / "rows.jsonl"), "content_field": "messages"}
    return {
        "model": {"name_or_path": str(folder / "model"), "task": "image-text-to-text"},
        "mixture": {
            "prefetch_workers": 0,
            "informs": [rows],
            "tokenization": {"max_length": 128},
            "eval_fraction": 0.25,
        },
        "trainer": {
            "trainer_type": "sft",
            "total_batch_size": 8,
            "max_training_steps": steps,
            "learning_rate": 3e-3,
            "weight_decay": 0.0,
            "log_steps": 1,
            "use_tensorboard": False,
            "save_directory": str(folder / name),
            **trainer,
        },
        "actions": ["train"],
    }


def loss_of_trl(folder: Path, batch: dict[str, np.ndarray]) -> float:
    """Return the loss that `trl.SFTTrainer` computes for a batch."""
    torch = require_torch()
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder / "model")
    here = batch["segment_ids"] > 0
    counts = (batch["input_ids"] == model.config.image_token_id).sum(axis=1) // FEATURES
    tiles = [row[:count] for row, count in zip(batch["pixel_values"], counts, strict=True)]
    inputs = {
        "input_ids": torch.tensor(batch["input_ids"]).long(),
        "attention_mask": torch.tensor(here).long(),
        "labels": torch.tensor(np.where(here, batch["labels"], -100)).long(),
        "pixel_values": torch.tensor(np.concatenate(tiles)),
    }
    trainer: Any = SFTTrainer(
        model=model,
        args=SFTConfig(str(folder / "trl"), report_to=[], use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list([{"text": "a cat"}] * len(here)),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    return float(trainer.compute_loss(model.train(), inputs).detach())


@pytest.mark.nightly
@pytest.mark.torch
def test_sft_with_images_has_the_loss_of_trl_and_improves_held_out_chats(folder: Path) -> None:
    made = document(folder, "improves", 12, evaluation_steps=4)
    (folder / "loader.yaml").write_text(yaml.safe_dump(made))
    loader: Any = eLargeModel.from_yaml(str(folder / "loader.yaml")).build_dataset()
    batch = loader.batch_at(0)
    wanted = loss_of_trl(folder, batch)
    figures, _ = trained(made)
    losses = [row["loss"] for row in figures if "loss" in row]
    held_out = [row["eval_loss"] for row in figures if "eval_loss" in row]
    assert losses[0] == pytest.approx(wanted, abs=1e-4)
    assert losses[-1] < 0.7 * losses[0]
    assert len(held_out) == 3
    assert held_out[-1] < 0.8 * held_out[0]


@pytest.mark.nightly
def test_resumed_sft_with_images_equals_uninterrupted_run(folder: Path) -> None:
    _, wanted = trained(document(folder, "whole", 4))
    trained(document(folder, "parts", 2, save_steps=2))
    rows, found = trained(document(folder, "parts", 4, save_steps=2))
    assert max(row["step"] for row in rows) == 4
    assert wanted
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
