"""Skipped steps: losses that are not finite, and spikes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_trainers import SFTArguments, SFTTrainer, TrainingDiverged
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.optimizers import apply_updates, build_optimizer, build_schedule, was_skipped


def course(losses, **given):
    """Apply a step with each loss; return whether it was skipped, and the trees after each step."""
    arguments = SFTArguments(
        learning_rate=0.1, skip_bad_steps=True, rolling_interval_length=8, **given
    )
    tx = build_optimizer(arguments, build_schedule(arguments, 100))
    tree = {"kernel": jnp.ones((4,), jnp.bfloat16)}
    state = tx.init(tree)
    step = jax.jit(lambda g, s, t, value: tx.update(g, s, t, value=value))
    skipped, trees = [], []
    for i, loss in enumerate(losses):
        norm = jnp.nan if loss is None else 1.0 + 0.01 * (i % 3)
        grads = {"kernel": norm * jnp.ones((4,))}
        value = jnp.float32(1.0 if loss is None else loss)
        updates, state = step(grads, state, tree, value)
        tree = apply_updates(tree, updates, state)
        skipped.append(bool(was_skipped(state)))
        trees.append((tree, state.inner))
    return skipped, trees


def same(left, right):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.mark.proves("skip_bad_steps", "rolling_interval_length")
@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free_adamw", "muon"])
def test_a_bad_step_changes_nothing(optimizer):
    losses = [1.0, 1.1, 0.9, 1.0, 1.05, 50.0, float("nan"), None, 1.0]
    skipped, trees = course(losses, optimizer=optimizer)
    assert skipped == [False] * 5 + [True] * 3 + [False]
    assert same(trees[4], trees[5]) and same(trees[4], trees[6]) and same(trees[4], trees[7])
    assert not same(trees[7], trees[8])


def test_spikes_are_judged_only_after_half_of_the_interval():
    assert course([1.0, 1.1, 0.9, 50.0])[0] == [False] * 4
    assert course([1.0, 1.1, 0.9, 1.0, 50.0])[0] == [False] * 4 + [True]


@pytest.mark.proves("sigma_factor")
def test_the_bound_is_so_many_standard_deviations():
    before = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0]
    mean, deviation = np.mean(before), np.std(before, ddof=1)
    for factor in (2.0, 6.0):
        below, above = (mean + (factor + d) * deviation for d in (-0.05, 0.05))
        assert not course([*before, below], sigma_factor=factor)[0][-1]
        assert course([*before, above], sigma_factor=factor)[0][-1]
    assert course([*before, 1e9, float("inf")], sigma_factor=None)[0][-2:] == [False, True]


@pytest.mark.nightly
def test_a_level_that_stays_is_accepted_in_the_end():
    skipped, _ = course([1.0, 1.1, 0.9, 1.0] + [5.0, 5.1] * 6)
    assert skipped[4] and not any(skipped[8:])


class Poisoned:
    """The toy's batches; some batches have a loss that is not finite."""

    def __init__(self, loader, bad):
        self.loader, self.bad = loader, bad
        self.steps_per_epoch, self.fingerprint = loader.steps_per_epoch, "poisoned"

    def batch_at(self, step):
        batch = self.loader.batch_at(step)
        weight = np.inf if step in self.bad else 1.0
        return {**batch, "loss_weights": np.full(batch["input_ids"].shape, weight, np.float32)}


def run(toy, directory, bad, **given):
    arguments = SFTArguments(
        save_directory=str(directory),
        total_batch_size=8,
        max_training_steps=8,
        log_steps=1,
        learning_rate=0.02,
        use_tensorboard=False,
        do_last_save=False,
        **given,
    )
    return SFTTrainer(arguments, toy.model(), Poisoned(toy.loader(), bad)).train()


@pytest.mark.nightly
def test_a_run_goes_on_after_a_bad_batch(toy, tmp_path):
    with pytest.raises(TrainingDiverged, match="step 3: loss"):
        run(toy, tmp_path / "stops", {2})
    output = run(toy, tmp_path / "goes_on", {2, 3}, skip_bad_steps=True, sigma_factor=None)
    rows = read_metrics(tmp_path / "goes_on" / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert int(output.state.step) == 8
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(output.state.graphstate))


@pytest.mark.nightly
def test_a_run_that_only_skips_ends(toy, tmp_path):
    with pytest.raises(TrainingDiverged, match="4 steps in a row were skipped"):
        run(toy, tmp_path, set(range(8)), skip_bad_steps=True, rolling_interval_length=4)
