"""Checkpoints over frozen weights contain the trained parameters, and require the same weights."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.specs import EasyDeLQuantizationConfig, LoraSpec
from ed_models.adapters.lora import lora_layers
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.stored.arrays import flat_arrays, stored_arrays
from ed_trainers.stored.fingerprint import fingerprint_arrays

SETTINGS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}


class Rows:
    steps_per_epoch = 8

    def batch_at(self, step):
        ids = np.random.default_rng(step).integers(1, 64, (8, 16)).astype(np.int32)
        return {"input_ids": ids, "labels": ids}


def base(seed=0, **given):
    return LlamaForCausalLM.create(LlamaConfig(**{**SETTINGS, **given}), seed=seed)


def train(directory, steps, model, **given):
    arguments = SFTArguments(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": steps,
            "save_steps": 2,
            "log_steps": 1,
            "learning_rate": 3e-2,
            "use_tensorboard": False,
            "do_last_save": False,
            **given,
        }
    )
    output = SFTTrainer(arguments, model=model, train_dataset=Rows()).train()
    rows = read_metrics(directory / "metrics.jsonl")
    return output, [row["loss"] for row in rows if "loss" in row]


def lora(model, seed=0, start=True):
    return model.apply_lora(LoraSpec(rank=2, init_lora_weights=start), seed=seed)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run over adapters that was saved after two of four steps, and the result of all four."""
    folder = tmp_path_factory.mktemp("begun")
    _, losses = train(folder / "whole", 4, lora(base()))
    train(folder / "part", 3, lora(base()))
    return folder / "part", losses


@pytest.mark.nightly
def test_a_checkpoint_holds_adapters_and_their_moments_alone(begun, capsys):
    path = begun[0] / "checkpoints" / "2"
    names = stored_arrays(path / "arrays")
    assert all("lora_" in name for name in names if name.startswith("graphstate"))
    assert not any(name.startswith("graphother") for name in names)
    sizes = {name: int(np.prod(leaf.shape)) for name, leaf in names.items()}
    adapters = sum(size for name, size in sizes.items() if name.startswith("graphstate"))
    assert sum(sizes.values()) <= 3 * adapters + 5  # two moments, and a few counts
    saved = json.loads(next((path / "run").rglob("metadata")).read_text())
    assert saved["base"]["graphother.model.embed_tokens.embedding"].startswith("float32[64, 32] ")
    assert "graphother.model.layers.1.self_attn.q_proj.kernel" in saved["base"]


@pytest.mark.nightly
def test_initial_values_from_the_weights_are_in_the_checkpoint(tmp_path):
    _, losses = train(tmp_path / "whole", 4, lora(base(), start="olora"))
    train(tmp_path / "part", 3, lora(base(), start="olora"))
    names = stored_arrays(tmp_path / "part" / "checkpoints" / "2" / "arrays")
    others = [name for name in names if name.startswith("graphother")]
    assert others
    assert all("lora_initial_" in name for name in others)
    # The checkpoint has the matrices, so another decomposition at the start has no effect.
    model = lora(base(scan_layers=False), start="olora")
    for _, layer in lora_layers(model):
        layer.lora_initial_a.set_value(-layer.lora_initial_a.get_value())
    np.testing.assert_allclose(train(tmp_path / "part", 4, model)[1], losses, rtol=1e-5)


@pytest.mark.nightly
def test_checkpoint_size_is_printed(tmp_path, capsys):
    train(tmp_path, 3, lora(base()))
    assert "checkpoint 2: " in (out := capsys.readouterr().out)
    assert " kB of frozen parameters are not saved)" in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [{}, {"scan_layers": False}, {"sharding_axis_dims": (2, 2, 1, 2, 1)}],
    ids=["same", "unrolled", "mesh"],
)
def test_adapter_training_resumes_over_same_base(begun, tmp_path, config):
    shutil.copytree(begun[0], tmp_path / "run")
    _, losses = train(tmp_path / "run", 4, lora(base(**config), seed=1))
    if config:
        np.testing.assert_allclose(losses, begun[1], rtol=1e-5)
    else:
        assert losses == begun[1]


@pytest.mark.nightly
def test_checkpoint_of_other_base_raises_checkpoint_error(begun, tmp_path):
    shutil.copytree(begun[0], tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"frozen weights that are not these .*load the weig"):
        train(tmp_path / "run", 4, lora(base(seed=1)))
    model = base()
    model.lm_head.kernel.set_value(model.lm_head.kernel.get_value().at[3, 5].add(1e-7))
    with pytest.raises(CheckpointError, match=r"\(graphother.lm_head.kernel was float32.* and is"):
        train(tmp_path / "run", 4, lora(model))


@pytest.mark.nightly
def test_frozen_parameters_of_a_full_model_are_not_saved_either(tmp_path):
    rules = [["embed_tokens", False], ["", True]]
    _, losses = train(tmp_path / "whole", 4, base(), trainable_rules=rules)
    train(tmp_path / "part", 3, base(), trainable_rules=rules)
    names = stored_arrays(tmp_path / "part/checkpoints/2/arrays")
    assert not any("embed_tokens" in name for name in names)
    assert train(tmp_path / "part", 4, base(), trainable_rules=rules)[1] == losses


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint4", "int4", "bool"]
)
def test_fingerprints_see_every_bit_and_no_mesh(dtype):
    values = np.random.default_rng(0).integers(0, 2, (16, 8, 4))
    array = jnp.asarray(values).astype(dtype)
    whole = fingerprint_arrays({"x": array})
    mesh = jax.make_mesh((8,), ("a",), devices=jax.devices())
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a"))
    if dtype not in ("uint4", "int4"):
        assert fingerprint_arrays({"x": jax.device_put(array, spec)}) == whole
    seen = set()
    for place in np.random.default_rng(1).integers(0, values.size, 20):
        other = values.reshape(-1).copy()
        other[place] ^= 1
        seen.add(
            fingerprint_arrays({"x": jnp.asarray(other.reshape(values.shape)).astype(dtype)})["x"]
        )
    assert whole["x"] not in seen
    assert len(seen) == len(set(np.random.default_rng(1).integers(0, values.size, 20)))


@pytest.mark.nightly
def test_fingerprints_do_not_depend_on_the_storage_of_layers():
    stacked, leaves = (
        fingerprint_arrays(flat_arrays(base(scan_layers=scan).split_module()[1]))
        for scan in (True, False)
    )
    assert stacked == leaves


@pytest.mark.nightly
def test_a_quantized_base_is_not_saved_and_is_known_again(tmp_path):
    def learner(seed=0, dtype="nf4", **given):
        config = EasyDeLQuantizationConfig(dtype=dtype, group_size=16)
        return lora(base(seed=seed, **given).quantize(config))

    _, losses = train(tmp_path / "whole", 4, learner())
    train(tmp_path / "part", 3, learner())
    shutil.copytree(tmp_path / "part", tmp_path / "unrolled")
    names = stored_arrays(tmp_path / "part/checkpoints/2/arrays")
    assert not any(name.startswith("graphother") for name in names)
    for other in (learner(seed=1), learner(dtype="int8"), lora(base())):
        with pytest.raises(CheckpointError, match="over frozen weights that are not these"):
            train(tmp_path / "part", 4, other)
    assert train(tmp_path / "part", 4, learner())[1] == losses
    unrolled = train(tmp_path / "unrolled", 4, learner(scan_layers=False))[1]
    np.testing.assert_allclose(unrolled, losses, rtol=1e-5)
