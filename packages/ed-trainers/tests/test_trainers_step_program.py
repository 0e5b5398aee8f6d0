"""A start loads the compiled step of an earlier process instead of tracing the method."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from ed_infra.compilation.cache import programs_folder
from ed_trainers import EasyDeLState
from ed_trainers.arguments import SFTArguments
from ed_trainers.methods import sft
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.step import build_train_step


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of stored steps, as the command line selects it."""
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(name, str(tmp_path / "easydel" / "jax"))
    yield programs_folder("steps")
    jax.config.update(name, before)


@pytest.fixture
def traces(monkeypatch):
    """A list with an entry for each trace of the loss."""
    found: list[str] = []
    own = sft.forward_cross_entropy

    def cross_entropy(*arguments, **options):
        found.append("trace")
        return own(*arguments, **options)

    monkeypatch.setattr(sft, "forward_cross_entropy", cross_entropy)
    return found


def two_steps(toy, dims=(1, 1, 1, 1, 1), loss=None, rows=8, **given):
    """Return the state after two optimizer steps, as one array."""
    batch = toy.loader(rows=rows).batch_at(0)
    arguments = SFTArguments(total_batch_size=rows, **given)
    model = toy.model(dims)
    trainer = sft.SFTTrainer(arguments, model=model)
    if loss is not None:
        trainer.method.record = replace(trainer.method.record, loss=loss)
    schedule = build_schedule(arguments, 10)
    tx = build_optimizer(arguments, schedule)
    state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
    placed = trainer.placement.place(microbatches(trainer.prepare(batch), 1), stacked=True)
    step = build_train_step(state, trainer.method, schedule, rows=rows, seed=0)
    leaves = tuple(jax.tree.leaves(state))
    for _ in range(2):
        given_leaves = leaves
        leaves, _ = step(leaves, placed)
        assert all(leaf.is_deleted() for leaf in given_leaves), "the state is donated"
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])


@pytest.mark.daily("dims1")
@pytest.mark.parametrize("dims", [(1, 1, 1, 1, 1), (1, 4, 1, 2, 1)])
def test_second_start_does_not_trace_and_computes_the_same_state(toy, home, traces, dims):
    first = two_steps(toy, dims)
    assert traces
    traces.clear()
    assert np.array_equal(two_steps(toy, dims), first)
    assert not traces


@pytest.mark.nightly
def test_step_is_traced_again_exactly_if_the_program_differs(toy, home, traces):
    two_steps(toy)
    for same in ({"log_steps": 3}, {"save_directory": "other"}, {"max_training_steps": 9}):
        traces.clear()
        two_steps(toy, **same)
        assert not traces, same
    for other in ({"learning_rate": 1e-3}, {"label_smoothing_factor": 0.1}, {"clip_grad": 1.0}):
        traces.clear()
        two_steps(toy, **other)
        assert traces, other
    traces.clear()
    two_steps(toy, rows=4)
    assert traces


def reads_the_tokenizer(run, *inputs):
    assert run.tokenizer is None
    return sft.loss(run, *inputs)


@pytest.mark.nightly
def test_step_of_a_loss_that_reads_more_than_options_is_not_stored(toy, home, traces):
    first = two_steps(toy, loss=reads_the_tokenizer)
    assert not home.exists()
    traces.clear()
    assert np.array_equal(two_steps(toy, loss=reads_the_tokenizer), first)
    assert traces


def test_damaged_file_is_replaced(toy, home, traces):
    first = two_steps(toy)
    (file,) = home.glob("*/step")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    traces.clear()
    assert np.array_equal(two_steps(toy), first)
    assert traces
    traces.clear()
    two_steps(toy)
    assert not traces
