"""Weights with NaN or infinite numbers are refused by the name of the tensor."""

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.specs import LoraSpec
from ed_models.adapters.lora import lora_layers
from ed_models.adapters.peft import read_adapter, save_adapter
from ed_models.checkpoints.hub import from_pretrained
from ed_models.checkpoints.tensor_files import is_finite
from ed_models.conformance import ONE, TINY
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx
from safetensors.numpy import load_file, save_file


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "model"
    config = LlamaConfig(**TINY, sharding_axis_dims=ONE)
    LlamaForCausalLM.create(config, seed=1).save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def load(directory, **options):
    return from_pretrained(directory, sharding_axis_dims=ONE, **options)


def change(directory, name, index, value):
    """Write a value into a tensor of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    tensors[name][index] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.daily("True-inf", "False-inf")
def test_tensor_is_named_unless_the_check_is_off(copy, value, scan):
    name = "model.layers.1.mlp.up_proj.weight"
    change(copy, name, (3, 5), value)
    options = {"config_kwargs": {"scan_layers": scan}}
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has NaN or infinite numbers"):
        load(copy, **options)
    model = load(copy, check_finite=False, **options)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    assert sum((~np.isfinite(leaf)).sum() for leaf in leaves) == 1


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_beyond_the_wanted_dtype_are_refused(copy):
    name = "model.norm.weight"
    change(copy, name, slice(None), 1e6)
    with pytest.raises(CheckpointError, match=f"'{name}' .* in float16"):
        load(copy, param_dtype="float16")


def test_tensor_of_an_adapter_is_named(saved, tmp_path):
    model = load(saved).apply_lora(LoraSpec(rank=2, targets="q_proj"))
    lora = next(layer for _, layer in lora_layers(model))
    lora.lora_b.set_value(lora.lora_b.get_value() * np.nan)
    save_adapter(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor '.*q_proj.lora_B.weight' has NaN"):
        read_adapter(load(saved), tmp_path)


@pytest.mark.parametrize(
    "name",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"],
)
def test_every_float_is_judged_by_its_bits(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    width = min(dtype.itemsize, 2)
    bits = np.arange(2 ** (8 * width)).astype(f"u{width}")
    values = np.zeros(len(bits), f"u{dtype.itemsize}") + bits
    values = (values << 8 * (dtype.itemsize - width)).astype(values.dtype).view(dtype)
    with np.errstate(all="ignore"):
        expected = np.isfinite(values.astype(np.float64))
    assert [is_finite(values[i : i + 1]) for i in range(0, len(values), 7)] == list(expected[::7])
    assert is_finite(values[expected])
    assert not is_finite(np.concatenate([np.resize(values[expected], 300_000), values]))
    assert is_finite(values[expected].reshape(2, -1).T)
