"""Checkpoints under damage: torn ones are skipped, ones that do not fit are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import CheckpointError
from ed_trainers.arguments import SFTArguments
from ed_trainers.checkpoints.checkpoint import Checkpoints
from ed_trainers.checkpoints.run_record import describe_run
from ed_trainers.state import EasyDeLState

RUN = describe_run(SFTArguments(), total_steps=10, loader={}, fingerprint="x")


def state_of(toy, seed=0, **kw):
    return EasyDeLState.create(
        model=toy.model(seed=seed, **kw), tx=optax.adamw(1e-2), init_opt_state=True
    )


def saved(toy, directory, steps=(1, 2, 3)):
    """Checkpoints of states whose bias is the step."""
    checkpoints = Checkpoints(directory, keep=None)
    state = state_of(toy)
    for step in steps:
        graphstate = jax.tree.map(lambda x, s=step: jnp.full_like(x, s), state.graphstate)
        checkpoints.save(step, state.replace(graphstate=graphstate), run=RUN)
    checkpoints.close()


def restore(toy, directory, run=RUN, state=None, say=lambda message: None):
    checkpoints = Checkpoints(directory, keep=None, say=say)
    found = checkpoints.restore_newest(state or state_of(toy, seed=1), run=run)
    checkpoints.close()
    return found


def test_the_arrays_are_copied_before_save_returns(toy, tmp_path):
    # The next step overwrites (donates) the arrays while the checkpoint is still being written.
    checkpoints = Checkpoints(tmp_path, keep=None)
    state = state_of(toy)
    big = {"big": jnp.arange(4_000_000, dtype=jnp.float32)}
    state = state.replace(graphother=big)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoints.save(1, state, run=RUN)
    jax.block_until_ready(overwrite(big["big"]))
    checkpoints.close()
    template = state_of(toy, seed=1).replace(graphother={"big": jnp.zeros(4_000_000)})
    _, restored, _ = restore(toy, tmp_path, state=template)
    np.testing.assert_array_equal(
        restored.graphother["big"], np.arange(4_000_000, dtype=np.float32)
    )


@pytest.mark.nightly
def test_every_kind_of_damage_to_the_newest_falls_back(toy, tmp_path):
    def damage(name, act):
        directory = tmp_path / name
        saved(toy, directory)
        act(directory / "3")
        said = []
        step, state, _ = restore(toy, directory, say=said.append)
        assert step == 2, name
        assert float(state.graphstate["bias"][0]) == 2.0, name
        assert len(said) == 1
        assert "checkpoint 3 cannot be read and is skipped" in said[0], name
        assert not (directory / "3").exists()
        # The step can be saved again.
        saved(toy, directory, steps=(3,))
        assert restore(toy, directory)[0] == 3

    def data_files(path):
        files = [p for p in (path / "arrays").rglob("*") if p.is_file() and "/d/" in str(p)]
        return sorted(files, key=lambda p: p.stat().st_size)

    def truncate(path):
        for file in data_files(path):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def remove(path):
        for file in data_files(path):
            file.unlink()

    damage("truncated", truncate)
    damage("missing", remove)
    damage("run-truncated", lambda p: next((p / "run").rglob("metadata")).write_text('{"argu'))
    damage("run-empty", lambda p: next((p / "run").rglob("metadata")).write_text(""))


def test_temporary_checkpoint_left_by_crash_is_ignored(toy, tmp_path):
    saved(toy, tmp_path, steps=(1, 2))
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    assert restore(toy, tmp_path)[0] == 1


def test_if_none_can_be_read_training_does_not_begin_anew(toy, tmp_path):
    saved(toy, tmp_path, steps=(1, 2))
    for step in ("1", "2"):
        next((tmp_path / step / "run").rglob("metadata")).write_text("")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be read"):
        restore(toy, tmp_path)
    # Nothing was moved: they can still be repaired.
    assert {p.name for p in tmp_path.iterdir()} >= {"1", "2"}
    assert restore(toy, tmp_path / "empty") is None


def test_another_run_or_model_is_refused(toy, tmp_path):
    saved(toy, tmp_path, steps=(1,))
    other = describe_run(
        SFTArguments(total_batch_size=16), total_steps=10, loader={}, fingerprint="x"
    )
    with pytest.raises(CheckpointError, match="total_batch_size 32, now it is 16"):
        restore(toy, tmp_path, run=other)
    with pytest.raises(CheckpointError, match="other data"):
        restore(toy, tmp_path, run={**RUN, "fingerprint": "y"})
    with pytest.raises(CheckpointError, match=r"is float32, the model requires bfloat16"):
        restore(toy, tmp_path, state=state_of(toy, param_dtype=jnp.bfloat16))
    plain = EasyDeLState.create(model=toy.model(), tx=optax.sgd(1.0), init_opt_state=True)
    with pytest.raises(CheckpointError, match="is not in the model"):
        restore(toy, tmp_path, state=plain)


@pytest.mark.nightly
def test_harmless_run_changes_are_reported_on_restore(toy, tmp_path):
    saved(toy, tmp_path, steps=(1,))
    said = []
    changed = describe_run(
        SFTArguments(learning_rate=1.0), total_steps=20, loader={}, fingerprint="x"
    )
    assert restore(toy, tmp_path, run=changed, say=said.append)[0] == 1
    assert "learning_rate 2e-05 -> 1.0" in said[0]
    assert "total steps 10 -> 20" in said[0]
