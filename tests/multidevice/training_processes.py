"""Train for `test_multidevice_training`, in one process of eight devices or in two processes.

Arguments: the directory of the run, and the number of steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from ed_infra import distributed
from ed_trainers import SFTArguments, SFTTrainer

from tests.multidevice import llama_case as case


class Rows:
    """Return the same rows in another order at each step, equal on every process."""

    steps_per_epoch = 4
    fingerprint = "rows"

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        batch = case.batch()
        ids, segments = (
            np.roll(batch[name], step, axis=0) for name in ("input_ids", "segment_ids")
        )
        labels = np.where(segments > 0, ids, -100).astype(np.int32)
        return {"input_ids": ids, "labels": labels, "segment_ids": segments}


def train(folder: Path, steps: int) -> None:
    """Train up to a step, from the last checkpoint in the folder if it exists."""
    model = case.LlamaForCausalLM.create(case.config((1, 2, 1, 2, 2)), seed=1)
    arguments = SFTArguments(
        save_directory=str(folder),
        total_batch_size=case.B,
        max_training_steps=steps,
        save_steps=2,
        log_steps=1,
        report_steps=1,
        learning_rate=1e-2,
        use_tensorboard=False,
    )
    SFTTrainer(arguments, model=model, train_dataset=Rows()).train()


if __name__ == "__main__":
    distributed.initialize()
    train(Path(sys.argv[1]), int(sys.argv[2]))
