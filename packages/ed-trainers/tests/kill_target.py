"""A training run in a separate process, which test_trainers_kill.py kills.

Usage: python kill_target.py DIRECTORY STEPS [--lora] [--pissa] [--dpo [--sync]] [--one-device]
                             [--die-while-saving STEP [--phase PHASE]]

With `--die-while-saving`, the process kills itself (SIGKILL) as soon as the checkpoint of that step
has reached a phase: it is `begun`, its files are `written`, or its checksums are (`sealed`).
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import numpy as np
from ed_infra.specs import LoraSpec
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import Callback, arguments_class, trainer_class
from ed_trainers.stored import checksums
from method_runs import Pairs

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


class PairLoader(Pairs):
    """Packed pairs, as slow."""

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        time.sleep(0.02)
        return super().batch_at(step)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieWhileSaving(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_save(self, trainer, step: int) -> None:
        if step == self.step:
            die()


def die_while_sealing(step: int, phase: str) -> None:
    """Die before or after the checksums of a step's checkpoint are written."""
    write = checksums.write_checksums

    def write_and_die(directory, **given) -> None:
        here = directory.name.startswith(f"{step}.")
        if here and phase == "written":
            die()
        write(directory, **given)
        if here:
            die()

    checksums.write_checksums = write_and_die


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--die-while-saving", type=int)
    parser.add_argument("--phase", choices=["begun", "written", "sealed"], default="begun")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--pissa", action="store_true", help="adapters start as a part of weights")
    parser.add_argument("--dpo", action="store_true", help="pairs, and the first weights beside")
    parser.add_argument("--sync", action="store_true", help="these follow the learner")
    parser.add_argument("--one-device", action="store_true")
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
        sharding_axis_dims=(1, 1 if given.one_device else -1, 1, 1, 1),
    )
    method, loader = ("dpo", PairLoader) if given.dpo else ("sft", Loader)
    arguments = arguments_class(method)(
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
        **({"sync_ref_model": True, "ref_model_sync_steps": 3} if given.sync else {}),
    )
    callbacks = []
    if given.die_while_saving is not None and given.phase == "begun":
        callbacks.append(DieWhileSaving(given.die_while_saving))
    elif given.die_while_saving is not None:
        die_while_sealing(given.die_while_saving, given.phase)
    model = LlamaForCausalLM.create(config)
    if given.lora or given.pissa:
        start = "pissa" if given.pissa else True
        model = model.apply_lora(LoraSpec(rank=2, dropout=0.1, init_lora_weights=start))
    trainer_class(method)(
        arguments,
        model=model,
        train_dataset=loader(),
        eval_dataset=loader(),
        callbacks=callbacks,
    ).train()


if __name__ == "__main__":
    main()
