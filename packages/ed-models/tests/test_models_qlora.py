"""Adapters over quantized weights: the base does not change, and a merge needs consent."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_layers.lora.slots import SlotParam
from ed_layers.quantization.model import quantized_matrices
from ed_models.adapters.lora import lora_layers
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.adapters.slots import slot_values, with_slots
from ed_models.adapters.values import get_adapter
from ed_models.conformance import forward
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.mixtral import MixtralConfig, MixtralForCausalLM
from flax import nnx

IDS = np.random.default_rng(0).integers(3, 60, (2, 8)).astype(np.int32)
SPECS = {
    "lora": LoraSpec(rank=2),
    "dora": LoraSpec(rank=2, dora=True),
    "embedding": LoraSpec(rank=2, targets=("embed", "q_proj")),
    "experts": LoraSpec(rank=2, targets=r"experts|q_proj"),
}


def build(experts=False):
    fields = tiny_llama(vocab_size=60, num_hidden_layers=2)
    fields.pop("model_type")
    if experts:
        config = MixtralConfig(**fields, num_local_experts=3, sharding_axis_dims=(1,) * 5)
        return MixtralForCausalLM.create(config, seed=0)
    return LlamaForCausalLM.create(LlamaConfig(**fields, sharding_axis_dims=(1,) * 5), seed=0)


def learned(model):
    for i, (_, layer) in enumerate(lora_layers(model)):
        noise = jax.random.normal(jax.random.key(i), layer.lora_b.shape)
        layer.lora_b.set_value(layer.lora_b.get_value() + 0.2 * noise)
        if layer.spec.dora:
            layer.lora_magnitude.set_value(1.1 * layer.lora_magnitude.get_value())
    return model


def logits(model):
    return np.asarray(forward(model, input_ids=IDS).logits)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", ["lora", "embedding", "experts", pytest.param("dora", marks=pytest.mark.nightly)]
)
def test_adapter_over_quantized_base_matches_dequantized_base(kind, tmp_path):
    quantized = build(kind == "experts").quantize({"dtype": "nf4", "pattern": r"^(?!.*lm_head)"})
    model = learned(quantized.apply_lora(SPECS[kind]))
    # The numbers equal those over plain matrices with the dequantized values.
    plain = learned(quantized.dequantize().apply_lora(SPECS[kind]))
    np.testing.assert_allclose(logits(model), logits(plain), atol=1e-5)
    assert np.abs(logits(model) - logits(quantized)).max() > 1e-3
    # Only the adapter is trained; the base has the same arrays.
    assert {str(path[-1]) for path, _ in nnx.to_flat_state(model.graphstate)} <= {
        "lora_a",
        "lora_b",
        "lora_magnitude",
    }
    before, after = (
        jax.tree.leaves([matrix for _, matrix in quantized_matrices(m)]) for m in (quantized, model)
    )
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    with pytest.raises(ConfigError, match=r"quantized \(nf4\).*dequantize=True.*MiB instead of"):
        model.unwrap_lora_to_layers()
    merged = model.unwrap_lora_to_layers(dequantize=True)
    np.testing.assert_allclose(logits(merged), logits(model), atol=1e-5)
    save_adapter(model, tmp_path)
    np.testing.assert_allclose(logits(load_adapter(quantized, tmp_path)), logits(model), atol=1e-5)


@pytest.mark.nightly
def test_places_for_adapters_over_a_quantized_base():
    quantized = build().quantize({"dtype": "int8"})
    served = with_slots(quantized, 1, 2)
    np.testing.assert_array_equal(logits(served), logits(quantized))
    adapter = get_adapter(learned(quantized.apply_lora(SPECS["lora"])))
    values = jax.tree.leaves(slot_values(served, adapter))
    assert len(values) == len(jax.tree.leaves(nnx.state(served, SlotParam)))
    assert all(np.abs(value).max() > 0 for value in values)


@pytest.mark.nightly
def test_gradients_are_those_over_plain_matrices():
    quantized = build().quantize({"dtype": "nf4"})

    def gradients(model):
        graphdef, learned, rest = model.split_module()

        def loss(learned):
            return nnx.merge(graphdef, learned, rest).compute_loss(IDS)[0].loss

        return jax.tree.leaves(jax.jit(jax.grad(loss))(learned))

    ours = gradients(learned(quantized.apply_lora(SPECS["dora"])))
    theirs = gradients(learned(quantized.dequantize().apply_lora(SPECS["dora"])))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.nightly
def test_unmerge_adapter_restores_quantized_base():
    quantized = build().quantize({"dtype": "int8"})
    model = learned(quantized.apply_lora(SPECS["lora"]))
    with pytest.raises(ConfigError, match="dequantize=True"):
        model.merge_adapter()
    merged = model.merge_adapter(dequantize=True)
    assert next(quantized_matrices(merged), None) is None
    restored = merged.unmerge_adapter()
    np.testing.assert_array_equal(logits(restored), logits(model))
    before, after = (jax.tree.leaves(nnx.state(m)) for m in (quantized, restored.set_adapter(None)))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
