"""A training run in a process of its own, to be killed. Run by test_trainers_kill.py.

Usage: python kill_target.py DIRECTORY STEPS [--die-while-saving STEP]

With `--die-while-saving`, the process kills itself (SIGKILL) as soon as the checkpoint of that step
has begun to be written.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import numpy as np
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import Callback, SFTArguments, SFTTrainer

VOCAB, LENGTH, ROWS = 128, 32, 8


class Loader:
    """Packed rows, a pure function of the step; slow enough that a kill hits the middle."""

    steps_per_epoch = 7
    fingerprint = "kill-target"

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        time.sleep(0.02)
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng(epoch).permutation(self.steps_per_epoch)
        random = np.random.default_rng((1, int(order[index])))
        ids = random.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        cut = random.integers(4, LENGTH - 4, (ROWS, 1))
        column = np.arange(LENGTH, dtype=np.int32)
        return {
            "input_ids": ids,
            "labels": ids,
            "segment_ids": np.where(column < cut, 1, 2).astype(np.int32),
            "position_ids": np.where(column < cut, column, column - cut).astype(np.int32),
        }


class DieWhileSaving(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_save(self, trainer, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--die-while-saving", type=int)
    given = parser.parse_args()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        sharding_axis_dims=(1, -1, 1, 1, 1),
    )
    arguments = SFTArguments(
        save_directory=given.directory,
        total_batch_size=ROWS,
        gradient_accumulation_steps=2,
        max_training_steps=given.steps,
        learning_rate=1e-2,
        scheduler="cosine",
        warmup_steps=3,
        clip_grad=1.0,
        log_steps=1,
        save_steps=4,
        save_total_limit=3,
        evaluation_steps=5,
    )
    die = [] if given.die_while_saving is None else [DieWhileSaving(given.die_while_saving)]
    SFTTrainer(
        arguments,
        model=LlamaForCausalLM.create(config),
        train_dataset=Loader(),
        eval_dataset=Loader(),
        callbacks=die,
    ).train()


if __name__ == "__main__":
    main()
