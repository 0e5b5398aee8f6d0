"""Train GRPO with the real engine for `test_multidevice_online`, in one process or in two.

Arguments: the folder of the run, the number of steps, and the call in which the reward fails (0:
never). A failing process writes its error to `<folder>/messages_<process>.txt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from ed_elarge.engine.rollout import EngineRollout
from ed_esurge import EngineConfig
from ed_infra import distributed
from ed_infra.errors import EasyDeLError
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class, trainer_class

PROMPT, NEW, ROWS = 8, 6, 8


class Batch(NamedTuple):
    input_ids: list[list[int]]


class Prompts:
    steps_per_epoch = 2
    fingerprint = "prompts"

    def batch_at(self, step: int) -> Batch:
        random = np.random.default_rng(step)
        return Batch([random.integers(3, 256, random.integers(2, 9)).tolist() for _ in range(2)])


class Reward:
    """Return the share of small tokens; only the first process returns the correct values."""

    def __init__(self, fails_in: int):
        self.fails_in, self.calls = fails_in, 0

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        self.calls += 1
        if self.calls == self.fails_in:
            raise ValueError("the judge is unavailable")
        other = 10.0 * jax.process_index()
        return [other + float(np.mean([t < 128 for t in ids])) for ids in completion_ids]


def train(folder: Path, steps: int, fails_in: int = 0) -> Reward:
    """Train up to a step; each generation is used for two steps."""
    config = tiny_llama(num_hidden_layers=2, sharding_axis_dims=(1, 4, 1, 2, 1))
    del config["model_type"]
    model = LlamaForCausalLM.create(LlamaConfig(**config), seed=0)
    arguments = arguments_class("grpo")(
        save_directory=str(folder),
        total_batch_size=ROWS,
        num_return_sequences=4,
        num_iterations=2,
        max_prompt_length=PROMPT,
        max_completion_length=NEW,
        max_training_steps=steps,
        log_steps=1,
        report_steps=1,
        learning_rate=0.02,
        use_tensorboard=False,
        progress_bar_type="none",
    )
    engine = EngineConfig(page_size=8, max_num_seqs=8)
    rollout = EngineRollout.of(model, None, engine, length=arguments.row_length)
    reward = Reward(fails_in)
    trainer_class("grpo")(
        arguments, model, Prompts(), rollout=rollout, reward_functions=[reward]
    ).train()
    return reward


def main(folder: Path, steps: int, fails_in: int) -> None:
    assert distributed.initialize()
    assert jax.process_count() == 2
    try:
        reward = train(folder, steps, fails_in)
    except EasyDeLError as error:
        (folder / f"messages_{jax.process_index()}.txt").write_text(str(error))
        return
    assert distributed.is_main() or reward.calls == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
