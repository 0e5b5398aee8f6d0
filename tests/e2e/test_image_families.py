"""A run file trains vision-language families on chats; `transformers` loads the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.__main__ import run_file
from ed_infra.testing import require_torch

from tests.image_checkpoints import FAMILIES, save_checkpoint

Image = pytest.importorskip("PIL.Image")


def chats(folder: Path) -> str:
    """Save chats with 0, 1 and 2 images of different sizes, and return the path of the file."""
    rows = []
    for number in range(16):
        names = []
        for place in range(number % 3):
            names.append(str(folder / f"{number}-{place}.png"))
            size = (20 + 9 * place, 60 - 3 * number)
            Image.new("RGB", size, (15 * number, 255 - 15 * number, 7)).save(names[-1])
        parts = [*[{"type": "image"}] * len(names), {"type": "text", "text": f"what {number}"}]
        answer = [{"type": "text", "text": "a cat"}]
        roles = {"user": parts, "assistant": answer}
        messages = [{"role": role, "content": content} for role, content in roles.items()]
        rows.append({"messages": messages, "images": names})
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arrays(path: Path) -> dict[str, np.ndarray]:
    model: Any = eLargeModel.from_pretrained(str(path), task="image-text-to-text").build_model()
    leaves = jax.tree_util.tree_leaves_with_path(model.split_module()[1])
    return {jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in leaves}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_run_file_trains_the_tower_and_the_decoder(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / "model")
    document = {
        "model": {"name_or_path": str(tmp_path / "model"), "task": "image-text-to-text"},
        "mixture": {
            "batch_size": 8,
            "prefetch_workers": 0,
            "informs": [{"data_files": chats(tmp_path), "content_field": "messages"}],
            "tokenization": {"max_length": 256},
        },
        "trainer": {
            "trainer_type": "sft",
            "max_training_steps": 2,
            "total_batch_size": 8,
            "learning_rate": 1e-2,
            "save_directory": str(tmp_path / "run"),
            "use_tensorboard": False,
        },
        "actions": ["train"],
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    assert run_file(str(file)) == 0
    before, after = (arrays(path) for path in (tmp_path / "model", tmp_path / "run" / "model"))
    changed = {at for at in before if not np.array_equal(before[at], after[at])}
    towers = ("vision_tower", "visual")
    assert any(tower in at for at in changed for tower in towers), "the images had no effect"
    assert any("language_model" in at for at in changed)
    require_torch()
    import transformers

    kind: Any = transformers.AutoModelForImageTextToText
    _, report = kind.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(report.values()), report
