"""A run of two processes with copies in memory, of which the first one is killed before it writes
the row of step 3. Run by test_trainers_lost_row.py.

Usage: python copy_target.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import jax
from ed_infra import distributed
from ed_trainers.arguments import SFTArguments
from ed_trainers.figures.metrics import JsonLines
from ed_trainers.methods.sft import SFTTrainer
from toys import ToyConfig, ToyLoader, ToyModel

ROWS, LOST = 8, 3
REPLICATED = (-1, 1, 1, 1, 1)


def kill_before(record: JsonLines, row, write=JsonLines.write) -> None:
    """Write a row, except that of the lost step."""
    if row.get("step") == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    write(record, row)


if __name__ == "__main__":
    distributed.initialize()
    JsonLines.write = kill_before  # type: ignore[method-assign]
    folder = Path(sys.argv[1])
    options = SFTArguments(
        save_directory=str(folder / "run"),
        memory_directory=str(folder / f"memory-{jax.process_index()}"),
        memory_save_steps=1,
        total_batch_size=ROWS,
        max_training_steps=6,
        log_steps=1,
        report_steps=1,
        use_tensorboard=False,
        progress_bar_type="none",
    )
    model = ToyModel(ToyConfig(REPLICATED)).shard_model()
    SFTTrainer(options, model, ToyLoader(ROWS, steps=6)).train()
