"""Checkpoints become model directories, and model directories saved states."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.specs import LoraSpec
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import CheckpointManager, EasyDeLState, SFTArguments, SFTTrainer, compare
from ed_trainers.compare import differences
from ed_trainers.convert import convert, get_model


class Rows:
    steps_per_epoch = 4

    def batch_at(self, step):
        ids = np.random.default_rng(step).integers(1, 32, (8, 8)).astype(np.int32)
        return {"input_ids": ids, "labels": ids}


def model(*, dtype="float32", scan=True):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        scan_layers=scan,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return LlamaForCausalLM.create(config, param_dtype=jnp.dtype(dtype))


def trained(directory, learner):
    arguments = SFTArguments(
        save_directory=str(directory),
        total_batch_size=8,
        max_training_steps=2,
        use_tensorboard=False,
    )
    return SFTTrainer(arguments, model=learner, train_dataset=Rows()).train()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_becomes_the_model_that_the_run_wrote(tmp_path, dtype):
    output = trained(tmp_path / "run", model(dtype=dtype))
    assert convert(output.checkpoint_path, tmp_path / "out") == tmp_path / "out"
    assert list(differences(tmp_path / "run/model", tmp_path / "out")) == []


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_model_directory_and_a_checkpoint_are_compared_name_by_name(
    tmp_path, capsys, monkeypatch, scan
):
    output = trained(tmp_path / "run", model(scan=scan))
    sides = tmp_path / "run/model", output.checkpoint_path
    assert list(differences(*sides)) == list(differences(*sides[::-1])) == []
    other = model(scan=scan)
    EasyDeLState.create(model=other).save_state(tmp_path / "state")
    other.lm_head.kernel[...] = other.lm_head.kernel[...] + 0.5
    other.save_pretrained(tmp_path / "other")
    (found,) = differences(tmp_path / "state", tmp_path / "other")
    assert found.name == "lm_head.weight" and found.largest == pytest.approx(0.5, rel=1e-5)
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "state"), str(tmp_path / "other")])
    assert compare.main() == 1
    assert "1 arrays differ, of 21; by 0.5 at most" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_model_becomes_a_saved_state_and_a_model_again(tmp_path):
    whole = model(scan=False)
    whole.save_pretrained(tmp_path / "model")
    assert convert(tmp_path / "model", tmp_path / "states") == tmp_path / "states/0"
    back = convert(tmp_path / "states/0", tmp_path / "again")
    assert list(differences(tmp_path / "model", back)) == []
    ids = np.arange(6)[None]
    loaded = CheckpointManager(tmp_path / "states").load(model())
    np.testing.assert_allclose(loaded(ids).logits, whole(ids).logits, atol=1e-5)
    again = AutoEasyDeLModelForCausalLM.from_pretrained(back, dtype=jnp.float32)
    np.testing.assert_allclose(again(ids).logits, whole(ids).logits, atol=1e-5)


@pytest.mark.nightly
def test_convert_accepts_saved_state(tmp_path):
    EasyDeLState.create(model=model()).save_state(tmp_path / "s")
    ids = np.arange(6)[None]
    np.testing.assert_allclose(
        get_model(tmp_path / "s")(ids).logits, model()(ids).logits, atol=1e-6
    )


@pytest.mark.nightly
def test_convert_rejects_directories_without_a_model(tmp_path):
    output = trained(tmp_path / "run", model().apply_lora(LoraSpec(rank=2)))
    with pytest.raises(CheckpointError, match="it contains only the trained arrays"):
        convert(output.checkpoint_path, tmp_path / "out")
    CheckpointManager(tmp_path / "tree").save({"a": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="not the configuration of a model"):
        convert(tmp_path / "tree/0", tmp_path / "out")
    (tmp_path / "empty/arrays").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a saved state"):
        convert(tmp_path / "empty", tmp_path / "out")
