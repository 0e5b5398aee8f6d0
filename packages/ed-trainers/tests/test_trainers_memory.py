"""Copies of the state in memory, and batches that the devices do not divide."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from ed_trainers import EasyDeLState, SFTArguments, SFTTrainer
from ed_trainers.checkpoints.memory import MemoryCopies
from ed_trainers.figures.meter import Meter
from ed_trainers.figures.metrics import read_metrics

SETTINGS = {
    "total_batch_size": 8,
    "log_steps": 1,
    "use_tensorboard": False,
    "progress_bar_type": "none",
    "do_last_save": False,
}


def train(toy, directory, dims=(1, 1, 1, 1, 1), **given):
    arguments = SFTArguments(save_directory=str(directory), **{**SETTINGS, **given})
    SFTTrainer(arguments, model=toy.model(dims, dropout=0.1), train_dataset=toy.loader()).train()
    return {row["step"]: row["loss"] for row in read_metrics(directory / "metrics.jsonl")}


@pytest.mark.proves("memory_directory", "memory_save_steps")
def test_run_continues_from_memory_on_a_mesh_that_does_not_divide_the_batch(toy, tmp_path, capsys):
    expected = train(toy, tmp_path / "whole", max_training_steps=7)
    memory = {"memory_directory": str(tmp_path / "memory"), "memory_save_steps": 2}
    train(toy, tmp_path / "run", (1, 4, 1, 1, 1), max_training_steps=5, **memory)
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["2.copy", "4.copy"]
    capsys.readouterr()
    found = train(toy, tmp_path / "run", (1, 3, 1, 1, 1), max_training_steps=7, **memory)
    assert "step 4 was read from the memory of the hosts" in capsys.readouterr().out
    assert [*found] == [*expected] == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-6)


def state(toy, dims, seed):
    made = EasyDeLState.create(model=toy.model(dims, seed=seed))
    return made.replace(step=made.step + seed)


def values(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.nightly
def test_damaged_and_incomplete_copies_are_never_read(toy, tmp_path):
    folder = tmp_path / "memory"
    copies = MemoryCopies(folder)
    for step in (1, 2, 3):
        copies.save(step, state(toy, (1, 4, 1, 1, 1), step), run={"step": step})
    copies.wait()
    assert copies.steps() == [2, 3]
    (folder / "4.part").write_bytes(b"interrupted")
    whole = (folder / "3.copy").read_bytes()
    target = state(toy, (1, 2, 1, 2, 1), 9)
    for position in (3, 100, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (folder / "3.copy").write_bytes(damaged)
        step, restored, run = copies.restore_newest(target, after_step=0)
        assert (step, run) == (2, {"step": 2})
        for one, other in zip(
            values(restored), values(state(toy, (1, 1, 1, 1, 1), 2)), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    (folder / "3.copy").write_bytes(whole)
    step, restored, _ = copies.restore_newest(target, after_step=2)
    assert step == 3
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
    assert copies.restore_newest(target, after_step=3) is None
    copies.close()
    shutil.rmtree(folder)


@pytest.mark.nightly
def test_copy_that_cannot_be_written_is_reported_and_the_run_goes_on(toy, tmp_path, capsys):
    (tmp_path / "memory").write_text("a file where the folder should be")
    memory = {"memory_directory": str(tmp_path / "memory"), "memory_save_steps": 2}
    assert [*train(toy, tmp_path / "run", max_training_steps=4, **memory)] == [1, 2, 3, 4]
    assert "a copy of the state could not be written" in capsys.readouterr().out


def test_goodput_counts_the_time_between_a_copy_and_the_next_start(monkeypatch):
    clock = {"monotonic": 100.0, "time": 5000.0}

    def forward(seconds):
        clock.update({name: value + seconds for name, value in clock.items()})

    for name in clock:
        monkeypatch.setattr(f"ed_trainers.figures.meter.time.{name}", lambda name=name: clock[name])
    first = Meter()
    first.ready()
    forward(20.0)
    saved = first.get_checkpoint_values(stopped=False)
    forward(5.0)  # lost: steps after the copy, and the start of the next process
    second = Meter()
    second.resume(saved)
    second.ready()
    forward(15.0)
    summary = second.summary()
    assert summary["lost_seconds"] == 5.0
    assert summary["productive_seconds"] == 35.0
    assert summary["goodput"] == 35 / 40
    stopped = first.get_checkpoint_values(stopped=True)
    forward(7.0)
    for same_launch, lost in ((False, 0.0), (True, 7.0)):
        later = Meter()
        later.resume(stopped, same_launch=same_launch)
        assert later.summary()["lost_seconds"] == lost
