"""Runs of toy methods, in one process or as one of several. Run by test_trainers_processes.py.

Usage: python process_target.py DIRECTORY METHOD ...

The record of a run is in DIRECTORY/METHOD; each process writes which rows it has read to
DIRECTORY/METHOD/read_PROCESS.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from ed_infra import distributed
from ed_trainers import arguments_class, trainer_class
from method_runs import Pairs, documents, packed
from toys import ToyConfig, ToyLoader, ToyModel

ROWS, STEPS = 8, 3
# Rows are split over processes, and halves of rows over the devices of a process.
DIMS = (1, 4, 1, 2, 1)


class Labelled:
    """Answers with labels, packed; some rows hold one document, so that answers go between rows."""

    steps_per_epoch = STEPS
    fingerprint = "labelled"

    def batch_at(self, step):
        random = np.random.default_rng(step)
        good = [[bool((row + i) % 2) for i in range(1 + row % 3)] for row in range(ROWS)]
        rows = [documents(random, len(own), good=own) for own in good]
        return packed(rows, label=[list(map(float, own)) for own in good])


class Divided:
    """A loader whose rows can be read apart; it notes those that are."""

    batch_size = ROWS

    def __init__(self, loader, rows=range(ROWS), read=None):
        self.loader, self.rows = loader, list(rows)
        self.read = [] if read is None else read
        self.steps_per_epoch, self.fingerprint = loader.steps_per_epoch, loader.fingerprint

    def for_rows(self, rows):
        return Divided(self.loader, rows, self.read)

    def batch_at(self, step):
        self.read.append([step, self.rows])
        return {name: array[self.rows] for name, array in self.loader.batch_at(step).items()}


LOADERS = {
    "sft": lambda: ToyLoader(ROWS, steps=STEPS),
    "kto": Labelled,
    "bco": Labelled,
    "dpo": Pairs,
    "orpo": Pairs,
}


def train(directory: Path, method: str) -> None:
    """Train the toy, and evaluate it at the end."""
    loader = Divided(LOADERS[method]())
    arguments = arguments_class(method)(
        save_directory=str(directory),
        total_batch_size=ROWS,
        gradient_accumulation_steps=2,
        eval_batch_size=4,
        max_training_steps=STEPS,
        learning_rate=0.05,
        log_steps=1,
        report_steps=1,
        do_last_save=False,
        use_tensorboard=False,
        progress_bar_type="none",
    )
    model = ToyModel(ToyConfig(DIMS), dropout=0.1 if method == "sft" else 0.0).shard_model()
    held_out = Divided(ToyLoader(ROWS, steps=2, seed=1)) if method == "sft" else None
    trainer_class(method)(arguments, model, loader, held_out).train()
    name = f"read_{jax.process_index()}.json"
    (directory / name).write_text(json.dumps([loader.read, held_out and held_out.read]))


if __name__ == "__main__":
    distributed.initialize()
    for method in sys.argv[2:]:
        train(Path(sys.argv[1]) / method, method)
