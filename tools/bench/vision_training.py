"""Measure training steps with images, with and without kept outputs of a frozen vision encoder.

    uv run python -m tools.bench.vision_training
    uv run python -m tools.bench.vision_training --shape tiny --rounds 1     a trial

The models are those of `tools.bench.vision_prefill` with random weights. The language model is
trained on all tokens by AdamW, and the tower and the projector are frozen. A step includes the
preparation of its batch. Rows of the table:

- without: each step encodes its images;
- kept: `image_feature_cache_gib`, all images were encoded earlier, as in later epochs;
- new images: the same with images that the encoder has not seen, as in the first epoch.

Steps are interleaved, so that a slow moment of the machine affects all rows. A cell contains the
median in milliseconds, and the speed relative to `without`.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from tools.bench.measure import Run, Timed, all_turns, command_line, machine, table
from tools.bench.vision_prefill import SHAPES, prompt

#: Rule of the trained parameters.
LANGUAGE = (("language_model|lm_head", True),)


def batch(shape: str, rows: int, images: int, seed: int) -> dict[str, np.ndarray]:
    """Return a batch as a loader returns it: prompts with images, one in each row."""
    made = [prompt(shape, images, seed * rows + row) for row in range(rows)]
    ids = np.stack([tokens for tokens, _ in made]).astype(np.int32)
    arrays = {name: np.stack([given[name] for _, given in made]) for name in made[0][1]}
    return {"input_ids": ids, **arrays}


class Steps:
    """Steps of a trainer on batches.

    Args:
        shape: name of the model.
        rows: number of rows of a batch.
        keeps: whether the outputs of the encoder are kept.
    """

    def __init__(self, shape: str, rows: int, *, keeps: bool):
        import jax
        import jax.numpy as jnp
        from ed_models.auto import AutoEasyDeLConfig, AutoEasyDeLModelForImageTextToText
        from ed_trainers import SFTArguments, SFTTrainer
        from ed_trainers.optimizers import build_optimizer, build_schedule
        from ed_trainers.state import EasyDeLState
        from ed_trainers.step import build_train_step

        kind, fields = SHAPES[shape]
        config = AutoEasyDeLConfig.for_model(kind, **fields, sharding_axis_dims=(1, 1, 1, 1, 1))
        kinds: Any = AutoEasyDeLModelForImageTextToText
        model = kinds.from_config(config, "float32", "float32", seed=0)
        arguments = SFTArguments(
            total_batch_size=rows,
            max_training_steps=1000,
            learning_rate=1e-4,
            trainable_rules=LANGUAGE,
            image_feature_cache_gib=1 if keeps else None,
        )
        self._trainer: Any = SFTTrainer(arguments, model)
        schedule = build_schedule(arguments, 1000)
        state = EasyDeLState.create(model=model, trainable=LANGUAGE)
        # A step donates its arrays, and the encoder reads those of the model.
        state = jax.tree.map(jnp.copy, state).init_tx(build_optimizer(arguments, schedule))
        self._step = build_train_step(state, self._trainer.method, schedule, rows=rows, seed=0)
        self._leaves = tuple(jax.tree.leaves(state))

    def __call__(self, given: dict[str, np.ndarray]) -> float:
        """Train on a batch, and return the loss."""
        import jax

        prepared = self._trainer.prepare(given)
        stacked = jax.tree.map(lambda x: x[None], prepared)
        placed = self._trainer.placement.place(stacked, stacked=True)
        self._leaves, report = self._step(self._leaves, placed)
        return float(report["loss"])


def main() -> None:
    parser = command_line("vision_training", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=sorted(SHAPES), default=["llava", "qwen2_vl"])
    add("--rows", type=int, default=1)
    add("--images", type=int, default=1)
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    header, rows = ["ms"], [["without"], ["kept"], ["new images"]]
    for shape in options.shape:
        medians = measure(shape, options.rows, options.images, options.rounds)
        tokens = batch(shape, options.rows, options.images, 0)["input_ids"].size
        header.append(f"{shape}, {options.rows * options.images} images, {tokens} tokens")
        for row in rows:
            ratio = medians["without"] / medians[row[0]]
            shown = "" if row[0] == "without" else f" ({ratio:.2f})"
            row.append(f"{medians[row[0]] * 1e3:.0f}{shown}")
    print(f"\n{table(header, rows)}")


def measure(shape: str, rows: int, images: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of the steps of each row of the table."""
    without, kept = (Steps(shape, rows, keeps=keeps) for keeps in (False, True))
    known, seeds = batch(shape, rows, images, 1), iter(range(100, 1000))
    losses = without(known), kept(known)
    if abs(losses[0] - losses[1]) > 1e-4:
        raise SystemExit(f"kept features change the loss of a step: {losses}")

    def timed(of: Steps, new: bool) -> Timed:
        given = batch(shape, rows, images, next(seeds)) if new else known
        began = time.perf_counter()
        of(given)
        return Timed(time.perf_counter() - began)

    cases = {"without": (without, False), "kept": (kept, False), "new images": (kept, True)}
    runs: dict[str, Run] = {name: partial(timed, *case) for name, case in cases.items()}
    turns = all_turns(runs, rounds=rounds)
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


if __name__ == "__main__":
    main()
