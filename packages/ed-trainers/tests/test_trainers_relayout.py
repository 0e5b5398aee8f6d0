"""A run resumes from a checkpoint with another storage, dtype or mesh of the same model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.stored.saved import load_arrays, save_arrays

STEPS = 6


class Rows:
    steps_per_epoch = 8

    def batch_at(self, step):
        ids = np.random.default_rng(step).integers(1, 64, (8, 16)).astype(np.int32)
        return {"input_ids": ids, "labels": ids}


def train(directory, steps, *, scan=True, dims=(1, 1, 1, 1, 1), dtype="float32", **given):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        scan_layers=scan,
        sharding_axis_dims=dims,
    )
    model = LlamaForCausalLM.create(config, param_dtype=jnp.dtype(dtype))
    arguments = SFTArguments(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": steps,
            "log_steps": 1,
            "learning_rate": 1e-2,
            "use_tensorboard": False,
            "progress_bar_type": "none",
            **given,
        }
    )
    state = SFTTrainer(arguments, model=model, train_dataset=Rows()).train().state
    rows = read_metrics(directory / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row], state


def stored(directory, **arrays):
    save_arrays(directory, {name.replace("__", "/"): value for name, value in arrays.items()}, {})
    return directory


def wanted(**arrays):
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name.replace("__", "/"): jax.ShapeDtypeStruct(shape, dtype, sharding=default)
        for name, (shape, dtype) in arrays.items()
    }


def test_arrays_are_taken_apart_and_stacked(tmp_path):
    layers = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    together = stored(
        tmp_path / "t", layers__run_0_4_2__0__w=layers[::2], layers__run_0_4_2__1__w=layers[1::2]
    )
    each = {f"layers__layer_{i}__w": ((3, 2), "float32") for i in range(4)}
    apart = load_arrays(together, wanted(**each))
    for i in range(4):
        np.testing.assert_array_equal(apart[f"layers/layer_{i}/w"], layers[i])
    again = stored(tmp_path / "a", **{name: layers[i] for i, name in enumerate(each)})
    run = load_arrays(again, wanted(layers__run_0_4_1__0__w=((4, 3, 2), "float32")))
    np.testing.assert_array_equal(run["layers/run_0_4_1/0/w"], layers)
    # Another period, straight from one stacked form to the other.
    run = load_arrays(together, wanted(layers__run_0_4_1__0__w=((4, 3, 2), "float32")))
    np.testing.assert_array_equal(run["layers/run_0_4_1/0/w"], layers)
    with pytest.raises(CheckpointError, match=r"run_0_4_2/1/w is not in the model"):
        load_arrays(together, wanted(**{name: each[name] for name in list(each)[:3]}))
    with pytest.raises(CheckpointError, match=r"layer_0/w has shape \(2, 3, 2\), the"):
        load_arrays(together, wanted(**dict.fromkeys(each, ((3,), "float32"))))


@pytest.mark.nightly
@pytest.mark.parametrize("inner", ["", "inner__"])
def test_parameters_come_from_masters_and_masters_from_parameters(tmp_path, inner):
    exact = np.float32([1.0001, 2.0002])
    master = f"opt_state__{inner}masters__w"
    low = stored(tmp_path / "low", graphstate__w=jnp.bfloat16(exact), **{master: exact})
    whole = load_arrays(low, wanted(graphstate__w=((2,), "float32")))
    np.testing.assert_array_equal(whole["graphstate/w"], exact)
    high = stored(tmp_path / "high", graphstate__w=exact)
    both = load_arrays(
        high, wanted(graphstate__w=((2,), "bfloat16"), **{master: ((2,), "float32")})
    )
    np.testing.assert_array_equal(both[master.replace("__", "/")], exact)
    np.testing.assert_array_equal(both["graphstate/w"], jnp.bfloat16(exact))


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_stacked_and_separate_layers_resume_each_other(tmp_path, optimizer):
    kwargs = {"min_dim_size_to_factor": 8} if optimizer == "adafactor" else {}
    given = {"optimizer": optimizer, "optimizer_kwargs": kwargs}
    whole, _ = train(tmp_path / "whole", STEPS, **given)
    train(tmp_path / "parts", 2, scan=True, **given)
    train(tmp_path / "parts", 4, scan=False, **given)
    parts, _ = train(tmp_path / "parts", STEPS, scan=True, **given)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.nightly
def test_meshes_and_storage_change_together(tmp_path):
    whole, _ = train(tmp_path / "whole", STEPS)
    train(tmp_path / "parts", 2, scan=True, dims=(1, 8, 1, 1, 1))
    train(tmp_path / "parts", 4, scan=False, dims=(1, 2, 1, 2, 2))
    parts, _ = train(tmp_path / "parts", STEPS, scan=True, dims=(2, 2, 1, 2, 1))
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.nightly
def test_parameters_change_their_dtype_through_the_masters(tmp_path):
    _, low = train(tmp_path / "run", 2, dtype="bfloat16")
    masters = jax.tree.leaves(low.opt_state.masters)
    _, high = train(tmp_path / "run", 2, dtype="float32")
    for master, parameter in zip(masters, jax.tree.leaves(high.graphstate), strict=True):
        assert parameter.dtype == jnp.float32
        np.testing.assert_array_equal(parameter, master)
    # In reverse: the masters were trained, and the parameters are the rounded masters.
    train(tmp_path / "run", 3, dtype="float32")
    losses, again = train(tmp_path / "run", 4, dtype="bfloat16", scan=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(again.graphstate)} == {jnp.dtype("bfloat16")}
    whole, _ = train(tmp_path / "whole", 4, dtype="bfloat16")
    np.testing.assert_allclose(losses, whole, rtol=2e-3)


@pytest.mark.nightly
def test_without_masters_another_dtype_is_refused(tmp_path):
    train(tmp_path, 2, master_dtype=None)
    with pytest.raises(CheckpointError, match="is float32, the model requires bfloat16"):
        train(tmp_path, 4, dtype="bfloat16", master_dtype=None)


@pytest.mark.nightly
def test_checkpoint_of_other_depth_raises_checkpoint_error(tmp_path):
    train(tmp_path, 2)
    arguments = SFTArguments(save_directory=str(tmp_path), total_batch_size=8, learning_rate=1e-2)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM.create(config)
    with pytest.raises(CheckpointError, match="is not in the model"):
        SFTTrainer(arguments, model=model, train_dataset=Rows()).train()
