"""EasyDeLState: a pytree that is created, stepped, saved and restored onto another mesh."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.base.module import STATE_GROUP
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.state import EasyDeLState
from ed_trainers.stored.arrays import flat_arrays, leaf_names


def equal(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.proves("EasyDeLState", "EasyDeLState.apply_gradients")
def test_apply_gradients_is_the_optimizer_and_counts(toy):
    model = toy.model()
    state = EasyDeLState.create(model=model, tx=optax.sgd(0.5), init_opt_state=True)
    grads = jax.tree.map(jnp.ones_like, state.graphstate)
    new = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
    assert int(new.step) == 1
    assert int(state.step) == 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a - 0.5, b), state.graphstate, new.graphstate
    )
    batch = toy.loader().batch_at(0)
    del batch["labels"]
    hidden = [s.model(**batch).last_hidden_state for s in (state, new)]
    assert not np.allclose(*hidden)


def test_optimizer_state_lives_with_its_parameters(toy):
    state = EasyDeLState.create(
        model=toy.model((1, 8, 1, 1, 1)), tx=optax.adamw(1e-3), init_opt_state=True
    )
    params = flat_arrays(state.graphstate)
    moments = {n: a for n, a in flat_arrays(state.opt_state).items() if "/mu/" in n or "/nu/" in n}
    assert len(moments) == 2 * len(params)
    for name, leaf in moments.items():
        assert leaf.sharding == params[name.split("u/", 1)[1]].sharding
    abstract = state.replace(opt_state=None).abstract(state.tx)
    assert leaf_names(abstract) == leaf_names(state)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


@pytest.mark.nightly
@pytest.mark.proves("EasyDeLState.save_state")
def test_save_and_load_onto_another_mesh(toy, tmp_path):
    state = EasyDeLState.create(
        model=toy.model((1, 8, 1, 1, 1)), tx=optax.adamw(1e-1), init_opt_state=True
    )
    state = state.apply_gradients(grads=state.graphstate)
    state.save_state(tmp_path / "s")
    other = EasyDeLState.create(
        model=toy.model((2, 2, 1, 2, 1), seed=1), tx=optax.adamw(1e-1), init_opt_state=True
    )
    loaded = other.load_state(tmp_path / "s")
    equal(loaded, state)
    assert int(loaded.step) == 1
    wanted = [leaf.sharding for leaf in jax.tree.leaves(other)]
    assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == wanted
    with pytest.raises(CheckpointError, match="is not empty"):
        state.save_state(tmp_path / "s")


def test_state_saves_without_optimizer(toy, tmp_path):
    state = EasyDeLState.create(model=toy.model(), tx=optax.adamw(1e-1), init_opt_state=True)
    state.save_state(tmp_path / "s", save_optimizer=False)
    other = EasyDeLState.create(model=toy.model(seed=1))
    equal(other.load_state(tmp_path / "s").graphstate, state.graphstate)


def test_unsuitable_saved_state_raises_checkpoint_error(toy, tmp_path):
    state = EasyDeLState.create(model=toy.model())
    state.save_state(tmp_path / "s")
    model = toy.model()
    model.kernel.set_value(jnp.zeros((16, 64)))
    with pytest.raises(CheckpointError, match=r"graphstate/kernel has shape \(16, 32\).*\(16, 64"):
        EasyDeLState.create(model=model).load_state(tmp_path / "s")
    with pytest.raises(CheckpointError, match="no complete saved state"):
        state.load_state(tmp_path / "nothing")


def test_contradictory_state_arguments_raise_config_error(toy):
    model = toy.model()
    with pytest.raises(ConfigError, match="either model, or graphdef"):
        EasyDeLState.create()
    with pytest.raises(ConfigError, match="come together"):
        EasyDeLState.create(graphdef=model.split_module()[0])
    state = EasyDeLState.create(model=model)
    with pytest.raises(ConfigError, match="init_tx"):
        state.apply_gradients(grads=state.graphstate)


@pytest.mark.proves("EasyDeLState.shard_state", "EasyDeLState.gather_state")
def test_a_state_is_gathered_and_sharded_again(toy):
    state = EasyDeLState.create(
        model=toy.model((1, 8, 1, 1, 1)), tx=optax.adamw(1e-1), init_opt_state=True
    )
    whole = state.gather_state()
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(whole))
    assert not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    equal(whole, state)
    again = whole.shard_state()
    equal(again, state)
    assert [leaf.sharding for leaf in jax.tree.leaves(again)] == [
        leaf.sharding for leaf in jax.tree.leaves(state)
    ]
    assert jax.tree.structure(again) == jax.tree.structure(state)
    # Without an optimizer too.
    again = whole.replace(opt_state=None).shard_state()
    assert again.shardings.graphstate == state.shardings.graphstate


@pytest.mark.proves("EasyDeLState.create", "EasyDeLState.init_tx")
def test_parts_and_models_give_one_state(toy):
    model, tx = toy.model(), optax.adamw(1e-1)
    one = EasyDeLState.create(model=model, tx=tx, init_opt_state=True, step=3)
    graphdef, graphstate, graphother = model.split_module()
    parts = EasyDeLState.create(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, step=3
    )
    assert parts.opt_state is None
    equal(parts.init_tx(tx), one)
    given = EasyDeLState.create(model=model, tx=tx, opt_state=one.opt_state, step=3)
    equal(given, one)
    assert int(one.step) == 3
    assert one.size == sum(leaf.nbytes for leaf in jax.tree.leaves(one))
    with pytest.raises(ConfigError, match="omit opt_state"):
        EasyDeLState.create(model=model, tx=tx, opt_state=one.opt_state, init_opt_state=True)
    with pytest.raises(ConfigError, match="there is no optimizer"):
        EasyDeLState.create(model=model).init_tx()


@pytest.mark.proves("EasyDeLState.load_state")
def test_a_loaded_state_goes_on(toy, tmp_path):
    state = EasyDeLState.create(model=toy.model(), tx=optax.adamw(1e-1), init_opt_state=True)
    state.apply_gradients(grads=state.graphstate).save_state(tmp_path / "s")
    loaded = state.load_state(tmp_path / "s")
    expected = state.apply_gradients(grads=state.graphstate)
    equal(
        loaded.apply_gradients(grads=loaded.graphstate),
        expected.apply_gradients(grads=expected.graphstate),
    )


@pytest.mark.proves("model.to_state")
def test_a_model_makes_its_state(monkeypatch):
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM.create(config)
    # What pyproject.toml declares; a checkout that is not installed anew does not know of it yet.
    project = Path(__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["entry-points"][STATE_GROUP]
    entries = [metadata.EntryPoint(n, v, STATE_GROUP) for n, v in declared.items()]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    state = model.to_state()
    assert type(state) is EasyDeLState
    equal(state, EasyDeLState.create(model=model))
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    with pytest.raises(ConfigError, match="pip install ed-trainers"):
        model.to_state()
    assert type(model.to_state(EasyDeLState)) is EasyDeLState
