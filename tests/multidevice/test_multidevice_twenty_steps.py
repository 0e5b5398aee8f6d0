"""Twenty float32 steps of `sft` and `dpo` have the losses of one device on every mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ed_trainers import arguments_class, trainer_class
from ed_trainers.figures.metrics import read_metrics

from tests.multidevice import llama_case as case
from tests.multidevice.training_processes import Rows

pytestmark = pytest.mark.nightly

STEPS = 20
MESHES: dict[str, case.Dims] = {
    "dp8": (8, 1, 1, 1, 1),
    "fsdp8": (1, 8, 1, 1, 1),
    "fsdp4 x tp2": (1, 4, 1, 2, 1),
    "fsdp4 x sp2": (1, 4, 1, 1, 2),
}


class PairsOfRows(Rows):
    """Return packed pairs: in each segment two answers to the same prompt."""

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        chosen = super().batch_at(step)
        segments = chosen["segment_ids"]
        begins = np.diff(segments, axis=1, prepend=0) != 0
        prompt = begins | np.roll(
            begins, 1, axis=1
        )  # the first two tokens of each segment are the prompt
        labels = np.where(prompt, -100, chosen["labels"]).astype(np.int32)
        others = np.where(prompt, chosen["input_ids"], 3 + (chosen["input_ids"] * 7 + step) % 249)
        rejected = {
            "input_ids": others.astype(np.int32),
            "labels": np.where(labels == -100, -100, others).astype(np.int32),
            "segment_ids": segments,
        }
        sides = {"chosen": {**chosen, "labels": labels}, "rejected": rejected}
        return {f"{side}_{name}": x for side, of in sides.items() for name, x in of.items()}


def losses(method: str, folder: Path, dims: case.Dims) -> np.ndarray:
    arguments = arguments_class(method)(
        save_directory=str(folder),
        total_batch_size=case.B,
        max_training_steps=STEPS,
        log_steps=1,
        learning_rate=3e-3,
        clip_grad=1.0,
        use_tensorboard=False,
        do_last_save=False,
    )
    model = case.LlamaForCausalLM.create(case.config(dims), seed=1)
    data = PairsOfRows() if method == "dpo" else Rows()
    trainer_class(method)(arguments, model=model, train_dataset=data).train()
    return np.array([row["loss"] for row in read_metrics(folder / "metrics.jsonl")])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_losses_on_every_mesh_match_one_device(
    tmp_path: Path, method: str, record_property
) -> None:
    one = losses(method, tmp_path / "one", case.ONE)
    assert len(one) == STEPS and one[-1] < 0.9 * one[0], "the loss must decrease"
    worst = {}
    for name, dims in MESHES.items():
        found = losses(method, tmp_path / name, dims)
        np.testing.assert_allclose(found, one, rtol=1e-5, err_msg=name)
        worst[name] = np.abs(found / one - 1).max()
    figures = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    record_property("summary", f"{STEPS} steps of {method} against one device: {figures}")
