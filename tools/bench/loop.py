"""Measure the cost of the training loop in addition to the step: host milliseconds per step.

    uv run python -m tools.bench.loop
    uv run python -m tools.bench.loop --steps 1000 --log-steps 10

A tiny Llama trains repeatedly on one batch, with a row of metrics every `--log-steps` steps. The
cost of the loop is the processor time of its thread between two rows, minus that of the bare
compiled step. A small step runs on the same thread. Both are medians over periods of 50 steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import Callback, EasyDeLState, SFTArguments, SFTTrainer
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.step import build_train_step

from tools.bench.measure import command_line, machine

ROWS, LENGTH, PIECE = 8, 32, 50


class OneBatch:
    """A loader that always returns the same batch, at no cost."""

    steps_per_epoch = 1_000_000

    def __init__(self) -> None:
        ids = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
        self._batch = {"input_ids": ids, "labels": ids, "segment_ids": np.ones_like(ids)}

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """Return the batch."""
        return self._batch


class Pieces(Callback):
    """Records the thread's processor time every PIECE steps."""

    def __init__(self) -> None:
        self.seconds: list[tuple[int, float]] = []

    def on_log(self, trainer: Any, row: Mapping[str, Any]) -> None:
        """Record the processor time if the row ends a period."""
        if row["step"] % PIECE == 0:
            self.seconds.append((row["step"], time.thread_time()))

    def milliseconds(self) -> float:
        """Return the median milliseconds of a step, without the first period."""
        return _median([seconds for _, seconds in self.seconds[1:]])


def model() -> LlamaForCausalLM:
    """Return a Llama whose step has a duration of about a millisecond."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return LlamaForCausalLM.create(config)


def arguments(directory: Path, steps: int, log_steps: int, **options: Any) -> SFTArguments:
    """Return the options of a run."""
    return SFTArguments(
        save_directory=str(directory),
        total_batch_size=ROWS,
        max_training_steps=steps,
        log_steps=log_steps,
        do_last_save=False,
        **options,
    )


def bare(steps: int) -> float:
    """Return the processor milliseconds of the compiled step; reports are read one step late."""
    with tempfile.TemporaryDirectory() as folder:
        options = arguments(Path(folder), steps, 1, use_tensorboard=False)
        trainer = SFTTrainer(options, model())
        schedule = build_schedule(options, steps)
        tx = build_optimizer(options, schedule)
        state = EasyDeLState.create(model=model(), tx=tx, init_opt_state=True)
        prepared = trainer.prepare(OneBatch().batch_at(0))
        batch = trainer.placement.place(microbatches(prepared, 1), stacked=True)
        step = build_train_step(state, trainer.method, schedule, rows=ROWS, seed=0)
        leaves, seconds = tuple(jax.tree.leaves(state)), []
        pending: Mapping[str, jax.Array] = {}
        for i in range(steps):
            leaves, report = step(leaves, batch)
            jax.device_get(dict(pending))
            pending = report
            if i % PIECE == 0:
                seconds.append(time.thread_time())
        return _median(seconds[1:])


def looped(steps: int, log_steps: int, **options: Any) -> float:
    """Return the processor milliseconds of a step in the loop."""
    with tempfile.TemporaryDirectory() as folder:
        pieces = Pieces()
        run = arguments(Path(folder), steps, log_steps, progress_bar_type="none", **options)
        SFTTrainer(run, model(), OneBatch(), callbacks=[pieces]).train()
        return pieces.milliseconds()


def figures(steps: int, log_steps: int) -> dict[str, float]:
    """Return the milliseconds of a bare step, and the cost that the loop adds with each sink."""
    runs: dict[str, Callable[[], float]] = {
        "record alone": lambda: looped(steps, log_steps, use_tensorboard=False),
        "record and TensorBoard": lambda: looped(steps, log_steps, use_tensorboard=True),
    }
    alone = bare(steps)
    return {"bare step": alone, **{name: run() - alone for name, run in runs.items()}}


def _median(seconds: list[float]) -> float:
    return 1e3 * statistics.median((b - a) / PIECE for a, b in pairwise(seconds))


if __name__ == "__main__":
    parser = command_line("loop", __doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--log-steps", type=int, default=1)
    options = parser.parse_args()
    print(machine())
    for name, value in figures(options.steps, options.log_steps).items():
        print(f"{name:<24} {value:7.3f} ms")
