"""Saved states by number, and the comparison of two."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import CheckpointError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import CheckpointManager, EasyDeLState
from ed_trainers.compare import differences


def state_of(toy, dims=(1, 1, 1, 1, 1), seed=0):
    return EasyDeLState.create(
        model=toy.model(dims, seed=seed), tx=optax.adamw(1e-1), init_opt_state=True
    )


def equal(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def llama(*, scan=True, seed=0):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        scan_layers=scan,
    )
    return LlamaForCausalLM.create(config, seed=seed)


def test_states_are_saved_by_their_step_and_loaded_onto_another_mesh(toy, tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=2)
    state = state_of(toy, (1, 8, 1, 1, 1))
    for _ in range(3):
        state = state.apply_gradients(grads=state.graphstate)
        assert manager.save(state) == tmp_path / str(int(state.step))
    assert manager.steps() == [2, 3]
    like = state_of(toy, (2, 2, 1, 2, 1), seed=1)
    loaded = manager.load(like)
    equal(loaded, state)
    assert loaded.shardings == like.shardings
    assert int(manager.load(like, step=2).step) == 2
    with pytest.raises(CheckpointError, match="exists: save under another step"):
        manager.save(state)
    with pytest.raises(CheckpointError, match="no complete saved state"):
        manager.load(like, step=7)
    with pytest.raises(CheckpointError, match="no saved state in"):
        CheckpointManager(tmp_path / "none").load()


@pytest.mark.nightly
def test_any_tree_and_modules_too(tmp_path):
    manager = CheckpointManager(tmp_path)
    tree = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 3), jnp.bfloat16)}}
    manager.save(tree)
    assert manager.steps() == [0]
    again = manager.load()
    equal(again, tree)
    assert again["b"]["c"].dtype == jnp.bfloat16
    model = llama()
    manager.save(model)
    other = manager.load(llama(scan=False, seed=1))
    ids = np.arange(6)[None]
    np.testing.assert_allclose(other(ids).logits, model(ids).logits, atol=1e-5)


def test_a_damaged_state_falls_back(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    for value in (1.0, 2.0):
        manager.save({"a": jnp.full(100, value)})
    for file in (tmp_path / "1/arrays").rglob("*"):
        if file.parent.name == "d":
            file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    assert float(manager.load()["a"][0]) == 1.0
    assert "is damaged" in caplog.text
    assert "the one before it is used" in caplog.text
    with pytest.raises(CheckpointError, match="is damaged"):
        manager.load(step=1)


def test_interrupted_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ed_trainers.stored.checksums.write_checksums", crash)
        with pytest.raises(KeyboardInterrupt):
            manager.save({"a": jnp.ones(3)})
    assert manager.steps() == []
    manager.save({"a": jnp.ones(3)})
    assert manager.steps() == [0]


@pytest.mark.nightly
def test_differences_are_named_and_measured(tmp_path):
    left = {"same": np.ones(4), "moved": np.array([3.0, 4.0]), "gone": np.ones(1)}
    right = {"same": np.ones(4), "moved": np.array([3.0, 4.5]), "new": np.ones(1)}
    wide = {"shape": np.ones((2, 2), np.float32), "dtype": np.ones(2, np.float32)}
    other = {"shape": np.ones((2, 3), np.float32), "dtype": np.ones(2, jnp.bfloat16)}
    for name, tree in (("a", {**left, **wide}), ("b", {**right, **other})):
        CheckpointManager(tmp_path / name).save(jax.tree.map(jnp.asarray, tree))
    found = {one.name: one for one in differences(tmp_path / "a/0", tmp_path / "b/0")}
    assert set(found) == {"moved", "gone", "new", "shape", "dtype"}
    assert found["moved"].largest == 0.5
    assert found["moved"].relative == pytest.approx(0.1)
    assert found["moved"].elements == (1, 2)
    assert found["shape"].description == "shape [2, 2] and [2, 3]"
    assert found["dtype"].description == "equal, stored as float32 and bfloat16"
    assert "only in" in found["gone"].description


@pytest.mark.nightly
def test_storage_of_layers_and_kind_of_file_do_not_matter(tmp_path):
    manager = CheckpointManager(tmp_path / "m")
    manager.save(llama(scan=True))
    manager.save(llama(scan=False))
    assert list(differences(tmp_path / "m/0", tmp_path / "m/1")) == []
    llama(seed=0).save_pretrained(tmp_path / "x")
    llama(seed=1).save_pretrained(tmp_path / "y")
    assert list(differences(tmp_path / "x", tmp_path / "x")) == []
    changed = {one.name for one in differences(tmp_path / "x", tmp_path / "y")}
    assert "lm_head.weight" in changed


@pytest.mark.nightly
def test_compare_command_reports_differences(tmp_path):
    def run(*paths):
        command = [sys.executable, "-m", "ed_trainers.compare", *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    for name, value in (("a", 1.0), ("b", 1.5)):
        CheckpointManager(tmp_path / name).save({"w": jnp.full(3, value), "x": jnp.ones(2)})
    assert run(tmp_path / "a/0", tmp_path / "a/0") == (0, "equal: 2 arrays\n", "")
    code, out, err = run(tmp_path / "a/0", tmp_path / "b/0")
    assert (code, err) == (1, "")
    assert "w: largest 0.5, relative 0.5, 3 of 3 elements" in out
    assert "1 arrays differ, of 2; by 0.5 at most" in out
    code, out, err = run(tmp_path / "a/0", tmp_path / "none")
    assert code == 2
    assert "contains no arrays: pass a checkpoint" in err
