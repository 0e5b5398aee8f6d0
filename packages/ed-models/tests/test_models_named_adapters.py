"""Several adapters of one model: put on, changed, merged and taken out again, by name."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models.adapters.lora import lora_layers
from ed_models.adapters.peft import read_adapter, save_adapter
from ed_models.conformance import forward
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

IDS = np.random.default_rng(0).integers(3, 60, (2, 8)).astype(np.int32)
FIRST = LoraSpec(rank=2, targets=("q_proj", "down_proj"))
SECOND = LoraSpec(rank=3, alpha=7.0, targets=(r"layers\.1\.mlp", "embed"))


def build(**changes):
    fields = tiny_llama(**{"vocab_size": 60, "num_hidden_layers": 2, **changes})
    fields.pop("model_type")
    return LlamaForCausalLM.create(LlamaConfig(**fields, sharding_axis_dims=(1,) * 5), seed=0)


@pytest.fixture(scope="module")
def base():
    return build()


def learned(model, seed):
    for i, (_, layer) in enumerate(lora_layers(model)):
        for name in ("lora_a", "lora_b"):
            variable = getattr(layer, name)
            noise = jax.random.normal(jax.random.key(100 * seed + i), variable.shape)
            variable.set_value(variable.get_value() + 0.3 * noise)
    return model


def two(base):
    """A model with two adapters, "first" and "second", the latter on its layers."""
    model = learned(base.apply_lora(FIRST, name="first"), 1)
    return learned(model.apply_lora(SECOND, name="second"), 2)


def logits(model):
    return np.asarray(forward(model, input_ids=IDS).logits)


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.mark.daily("pissa")
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapter_that_started_from_the_weights_waits_and_is_merged(base, start):
    spec = LoraSpec(rank=2, alpha=3.0, targets=("q_proj", "down"), init_lora_weights=start)
    model = learned(base.apply_lora(spec, name="part"), 1)
    expected, plain = logits(model), logits(base)
    assert np.abs(expected - plain).max() > 1e-3
    inactive = model.set_adapter(None)
    np.testing.assert_array_equal(logits(inactive), plain)
    np.testing.assert_array_equal(logits(inactive.set_adapter("part")), expected)
    merged = model.merge_adapter()
    np.testing.assert_allclose(logits(merged), expected, atol=1e-5)
    np.testing.assert_array_equal(logits(merged.unmerge_adapter()), expected)


@pytest.mark.nightly
def test_one_computes_and_the_others_wait(base):
    first = learned(base.apply_lora(FIRST, name="first"), 1)
    model = two(base)
    assert model.adapter_names == ("second", "first")
    assert model.active_adapter == "second"
    assert first.adapter_names == ("first",), "a method changes no model"
    again = model.set_adapter("first")
    assert again.active_adapter == "first"
    assert set(again.adapter_names) == {"first", "second"}
    np.testing.assert_array_equal(logits(again), logits(first))
    np.testing.assert_array_equal(logits(again.set_adapter("second")), logits(model))
    assert np.abs(logits(model) - logits(first)).max() > 1e-3
    # What waits is neither trained nor an input of a step.
    assert len(leaves(model.set_adapter("first"))) == len(leaves(first))
    none = model.set_adapter(None)
    assert none.active_adapter is None
    assert not none.lora_is_enabled
    np.testing.assert_array_equal(logits(none), logits(base))


@pytest.mark.nightly
def test_adapters_are_added_selected_and_deleted_by_name(base, tmp_path):
    model = two(base)
    with pytest.raises(ConfigError, match=r"named 'first'.*delete_adapter"):
        model.apply_lora(FIRST, name="first")
    with pytest.raises(ConfigError, match=r"unknown adapter 'frist'; did you mean 'first'"):
        model.set_adapter("frist")
    with pytest.raises(ConfigError, match="a non-empty string, got ''"):
        model.apply_lora(FIRST, name="")
    rest = model.delete_adapter("second")
    assert (rest.adapter_names, rest.active_adapter) == (("first",), None)
    np.testing.assert_array_equal(logits(rest), logits(base))
    rest = model.delete_adapter("first")
    assert (rest.adapter_names, rest.active_adapter) == (("second",), "second")
    # From a directory, and as what waits under a name: the same values.
    model.save_pretrained(tmp_path)
    loaded = base.apply_lora(FIRST).load_adapter(tmp_path, name="from a file")
    assert loaded.adapter_names == ("from a file", "default")
    np.testing.assert_allclose(logits(loaded), logits(model), atol=1e-6)


@pytest.mark.nightly
def test_unmerge_adapter_restores_merged_weights(base):
    model = two(base)
    merged = model.merge_adapter()
    assert not merged.lora_is_enabled
    assert merged.adapter_names == ("second", "first")
    np.testing.assert_allclose(logits(merged), logits(model), atol=1e-5)
    assert [x.shape for x in leaves(merged)] == [x.shape for x in leaves(base)]
    restored = merged.unmerge_adapter()
    assert restored.active_adapter == "second"
    np.testing.assert_array_equal(logits(restored), logits(model))
    for x, y in zip(leaves(restored.set_adapter(None)), leaves(base), strict=True):
        np.testing.assert_array_equal(x, y)
    other = model.merge_adapter("first")
    assert other.adapter_names == ("first", "second")
    np.testing.assert_allclose(logits(other), logits(model.set_adapter("first")), atol=1e-5)
    for refused in (
        lambda: merged.apply_lora(FIRST, name="third"),
        lambda: merged.set_adapter("first"),
        lambda: merged.delete_adapter("first"),
        lambda: merged.merge_adapter("first"),
    ):
        with pytest.raises(ConfigError, match="'second' is merged into the weights"):
            refused()
    with pytest.raises(ConfigError, match="no adapter is merged"):
        model.unmerge_adapter()
    with pytest.raises(ConfigError, match="pass the name of one of"):
        model.set_adapter(None).merge_adapter()
    with pytest.raises(ConfigError, match="another layout"):
        merged.to_layout("leaves").unmerge_adapter()
    assert model.unwrap_lora_to_layers().adapter_names == ()


@pytest.mark.nightly
def test_adapter_of_other_model_raises_error(base, tmp_path):
    """The names and shapes that do not fit are listed."""
    save_adapter(learned(base.apply_lora(FIRST), 1), tmp_path)
    with pytest.raises(CheckpointError, match=r"another model[\s\S]*do not fit \[o, i\] = \["):
        read_adapter(build(intermediate_size=40), tmp_path)
    deeper = learned(build(num_hidden_layers=3).apply_lora(FIRST), 1)
    save_adapter(deeper, tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_proj: no such module"):
        base.load_adapter(tmp_path)
    with pytest.raises(ConfigError, match="at least 1"):
        LoraSpec(rank=0)
