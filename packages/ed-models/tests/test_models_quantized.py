"""Models with quantized weights: by their configuration, on meshes, with tied heads, learning."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_layers.quantization.model import QuantParam, quantized_matrices
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.conformance import MESHES, forward
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

IDS = np.random.default_rng(0).integers(3, 60, (2, 8)).astype(np.int32)
EVERYTHING = [("mlp", {"dtype": "nf4", "group_size": 8}), ("", {"dtype": "int8"})]


def build(dims=(1, 1, 1, 1, 1), **fields):
    tiny = {**tiny_llama(vocab_size=64, num_hidden_layers=2), **fields}
    tiny.pop("model_type")
    return LlamaForCausalLM.create(LlamaConfig(**tiny, sharding_axis_dims=dims), seed=0)


def logits(model):
    return np.asarray(forward(model, input_ids=IDS).logits)


def formats(model):
    return {n: (w.format, w.group_size) for names, w in quantized_matrices(model) for n in names}


@pytest.mark.nightly
@pytest.mark.proves("quantization_config", "bits")
def test_config_options_select_quantization():
    by_config = build(quantization_config={"dtype": "int8", "group_size": 8}).quantize()
    assert formats(by_config)["model.layers.1.mlp.up_proj.kernel"] == ("int8", 8)
    assert "lm_head.kernel" not in formats(by_config), "the pattern leaves head and embedding out"
    by_bits = formats(build(bits=4).quantize())
    assert {format for format, _ in by_bits.values()} == {"nf4"}
    assert set(by_bits) == set(formats(by_config))
    with pytest.raises(ConfigError, match="no quantization_config"):
        build().quantize()


@pytest.mark.nightly
def test_weights_that_stay_plain_are_warned_of(tmp_path, caplog):
    """`bits` and `quantization_config` only store rules, in every way to make a model."""
    rules = {"quantization_config": {"dtype": "int8"}}

    def messages(make: Callable[[], Any]) -> str:
        forget_said()
        caplog.clear()
        with caplog.at_level("WARNING", logger="easydel"):
            model = make()
        assert not model.is_quantized or not caplog.text
        return caplog.text

    read = partial(AutoEasyDeLModelForCausalLM.from_pretrained, str(tmp_path))
    plain = build()
    plain.save_pretrained(tmp_path)
    create = AutoEasyDeLModelForCausalLM.from_config
    for make in (
        lambda: build(bits=4),
        lambda: create(plain.config.replace(**rules)),
        lambda: read(config_kwargs=rules),
        lambda: read(config_kwargs={"bits": 8}),
        lambda: read(**rules),
    ):
        assert "Call model.quantize(), or load" in messages(make)
    assert not messages(lambda: read(**rules, apply_quantization=False))
    assert not messages(lambda: read(**rules, apply_quantization=True))
    read(**rules, apply_quantization=True).save_pretrained(tmp_path)
    assert not messages(read), "the file has codes"


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_embedding_and_head_match_dequantized_model(tied):
    model = build(tie_word_embeddings=tied).quantize(EVERYTHING)
    assert model.is_quantized
    assert formats(model)["model.embed_tokens.embedding"][0] == "int8"
    plain = model.dequantize()
    assert not plain.is_quantized
    np.testing.assert_allclose(logits(model), logits(plain), atol=2e-5)
    theirs = dict(nnx.to_flat_state(gradients(plain)))
    for path, variable in nnx.to_flat_state(gradients(model)):
        expected = theirs[path].get_value()
        np.testing.assert_allclose(variable.get_value(), expected, atol=2e-5, err_msg=str(path))


def gradients(model, lower=False):
    """The gradients of the trainable parameters, or the program that computes them."""
    graphdef, params, other = model.split_module()

    def loss(params, other):
        return nnx.merge(graphdef, params, other).compute_loss(jnp.asarray(IDS))[0].loss

    grad = jax.jit(jax.grad(loss))
    return grad.lower(params, other) if lower else grad(params, other)


@pytest.mark.nightly
@pytest.mark.parametrize("dims", MESHES)
def test_many_devices_are_as_one(dims):
    expected = logits(build(tie_word_embeddings=True).quantize(EVERYTHING))
    model = build(dims, tie_word_embeddings=True).quantize(EVERYTHING)
    np.testing.assert_allclose(logits(model), expected, atol=2e-5)
    held = {str(p): v.get_value().codes for p, v in nnx.to_flat_state(nnx.state(model, QuantParam))}
    whole = [name for name, codes in held.items() if codes.sharding.is_fully_replicated]
    assert not [name for name in whole if "mlp" in name], "codes are split as the matrix would be"


@pytest.mark.nightly
def test_adapters_learn_through_codes_and_nothing_else_does():
    model = build().quantize(EVERYTHING).apply_lora(LoraSpec(rank=2))
    grads = gradients(model)
    learned = {path[-1] for path, _ in nnx.to_flat_state(grads)}
    assert learned == {"lora_a", "lora_b"}
    of_plain = gradients(model.dequantize())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, of_plain)


@pytest.mark.nightly
def test_the_matrices_of_a_scanned_model_are_decoded_layer_by_layer():
    """Neither forward nor backward holds the plain matrices of two layers."""
    fields = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    model = build(**fields, scan_layers=True).quantize({"dtype": "nf4"})
    text = gradients(model.apply_lora(LoraSpec(rank=2)), lower=True).compile().as_text()
    assert "u8[8,64,512]" in text, "codes of all layers"
    assert "f32[8,128,512]" not in text
    assert "f32[8,64,512]" not in text


def test_invalid_quantize_calls_raise_config_error():
    quantized = build().quantize({"dtype": "int8"})
    with pytest.raises(ConfigError, match="quantized again"):
        quantized.quantize({"dtype": "nf4"})
    with pytest.raises(ConfigError, match="no matrix of the model is quantized"):
        build().dequantize()
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.\S+: group_size 7 of nf4"):
        build().quantize({"dtype": "nf4", "group_size": 7})
