"""One optimizer step: accumulation equals the big batch, meshes equal one device."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import jax
import numpy as np
import pytest
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.arguments import SFTArguments
from ed_trainers.contract import Models
from ed_trainers.methods.sft import SFTTrainer
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.state import EasyDeLState
from ed_trainers.step import build_train_step


def one_step(model, batch, accumulation=1, loss=None, **given):
    """Return parameters by name before and after a step, and its report."""
    given = {"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, **given}
    rows = batch["input_ids"].shape[0]
    arguments = SFTArguments(
        total_batch_size=rows, gradient_accumulation_steps=accumulation, **given
    )
    trainer = SFTTrainer(arguments, model=model)
    schedule = build_schedule(arguments, 10)
    state = EasyDeLState.create(
        model=model, tx=build_optimizer(arguments, schedule), init_opt_state=True
    )
    before = jax.tree.map(np.array, state.graphstate)
    parts = microbatches(trainer.prepare(batch), accumulation)
    placed = trainer.placement.place(parts, stacked=True)
    treedef = jax.tree.structure(state)
    if loss is not None:
        record = trainer.method.record
        trainer.method.record = replace(record, loss=lambda run, *inputs: loss(*inputs))
    step = build_train_step(state, trainer.method, schedule, rows=rows // accumulation, seed=0)
    leaves, report = step(tuple(jax.tree.leaves(state)), placed)
    after = jax.tree.map(np.array, jax.tree.unflatten(treedef, leaves).graphstate)
    return before, after, jax.device_get(report)


def assert_near(left, right, tolerance):
    """Compare trees by the largest difference relative to the largest element of each leaf."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


@pytest.mark.nightly
def test_separate_layers_are_rematerialized_on_one_cpu():
    def temporary(policy):
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=6,
            num_attention_heads=4,
            sharding_axis_dims=(1, 1, 1, 1, 1),
            scan_layers=False,
            gradient_checkpointing=policy,
        )
        arguments = SFTArguments(total_batch_size=4, optimizer="sgd")
        trainer = SFTTrainer(arguments, model=LlamaForCausalLM.create(config))
        schedule = build_schedule(arguments, 10)
        tx = build_optimizer(arguments, schedule)
        state = EasyDeLState.create(model=trainer.model, tx=tx, init_opt_state=True)
        batch = trainer.prepare({"input_ids": np.ones((4, 256), np.int32)})
        placed = trainer.placement.place(microbatches(batch, 1), stacked=True)
        step = build_train_step(state, trainer.method, schedule, rows=4, seed=0)
        lowered = step.lower(tuple(jax.tree.leaves(state)), placed)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary("nothing_saveable") < temporary("") / 2


@pytest.mark.parametrize("accumulation", [2, 4, 8])
@pytest.mark.daily("2")
def test_accumulation_equals_the_big_batch(toy, accumulation):
    batch = toy.loader(rows=8).batch_at(0)
    tokens = (batch["labels"][:, 1:] != -100).sum(1)
    assert len(set(tokens.tolist())) > 3, "the rows must differ in length, or nothing is tested"
    before, big, big_report = one_step(toy.model(), batch)
    _, small, small_report = one_step(toy.model(), batch, accumulation)
    moved = jax.tree.map(lambda a, b: b - a, before, big)
    moved_small = jax.tree.map(lambda a, b: b - a, before, small)
    assert_near(moved_small, moved, 1e-6 * 10)  # differences of float32 parameters
    assert_near(small, big, 1e-6)
    assert small_report["loss"] == pytest.approx(big_report["loss"], rel=1e-6)
    assert small_report["grad_norm"] == pytest.approx(big_report["grad_norm"], rel=1e-6)
    assert small_report["weight"] == big_report["weight"] == tokens.sum()


@pytest.mark.nightly
def test_a_mean_of_means_would_not_pass(toy):
    # Control: accumulated means differ from the result by far more than the tolerance.
    batch = toy.loader(rows=8).batch_at(0)
    trainer = SFTTrainer(SFTArguments(total_batch_size=8), model=toy.model())
    prepared = trainer.prepare(batch)
    rows = [
        trainer.loss(
            Models(trainer.model), jax.tree.map(itemgetter(slice(i, i + 1)), prepared), None
        )
        for i in range(8)
    ]
    mean_of_means = np.mean([float(row.sums["main_loss"].value) for row in rows])
    _, _, report = one_step(toy.model(), batch)
    assert abs(mean_of_means - report["loss"]) > 1e-4 * report["loss"]


@pytest.mark.parametrize("dims", [(1, 8, 1, 1, 1), (2, 2, 1, 2, 1), (1, 2, 1, 1, 4)])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.daily("2-dims0")
def test_a_mesh_equals_one_device(toy, dims, accumulation):
    batch = toy.loader(rows=16).batch_at(0)
    _, one, one_report = one_step(toy.model(), batch)
    _, many, many_report = one_step(toy.model(dims), batch, accumulation)
    assert_near(many, one, 1e-6)
    assert many_report["loss"] == pytest.approx(one_report["loss"], rel=1e-6)
    assert many_report["grad_norm"] == pytest.approx(one_report["grad_norm"], rel=1e-5)


def test_each_microbatch_and_step_draws_its_own_randomness(toy):
    keys = []
    model = toy.model()
    trainer = SFTTrainer(SFTArguments(), model=model)

    def loss(models, batch, key):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return trainer.loss(models, batch, key)

    batch = toy.loader(rows=8).batch_at(0)
    one_step(model, batch, 4, loss)
    expected = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), row) for row in (0, 2, 4, 6)
    ]
    assert sorted(set(keys)) == sorted(tuple(jax.random.key_data(k).tolist()) for k in expected)
