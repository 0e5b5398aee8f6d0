"""Rows of embeddings and heads that are added for new tokens, or removed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.adapters.lora import lora_layers
from ed_models.adapters.token_rows import draw_rows
from ed_models.conformance import forward
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

ONE = (1, 1, 1, 1, 1)
IDS = np.random.default_rng(0).integers(3, 60, (2, 8)).astype(np.int32)


def build(dims=ONE, **changes):
    fields = tiny_llama(**{"vocab_size": 60, "num_hidden_layers": 2, **changes})
    fields.pop("model_type")
    return LlamaForCausalLM.create(LlamaConfig(**fields, sharding_axis_dims=dims), seed=0)


def logits(model, ids=IDS):
    return np.asarray(forward(model, input_ids=ids).logits)


def table(model):
    return np.asarray(model.model.embed_tokens.embedding.get_value())


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_old_logits_stay_and_new_tokens_are_computed(tied, tmp_path):
    base = build(tie_word_embeddings=tied)
    model = base.resize_token_embeddings(67)
    assert base.config.vocab_size == 60, "a method changes no model"
    assert model.config.vocab_size == 67
    assert all(
        m.config.vocab_size == 67 for _, m in nnx.iter_modules(model) if hasattr(m, "config")
    )
    out = logits(model)
    np.testing.assert_allclose(out[..., :60], logits(base), atol=2e-6)
    np.testing.assert_array_equal(table(model)[:60], table(base))
    np.testing.assert_allclose(table(model)[60:] - table(base).mean(axis=0), 0, atol=1e-4)
    assert np.isfinite(logits(model, IDS + 7)).all()
    model.save_pretrained(tmp_path)
    again = AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path, sharding_axis_dims=ONE)
    np.testing.assert_array_equal(logits(again), out)
    fresh = LlamaForCausalLM.create(model.config, seed=0)
    assert jax.tree.map(np.shape, nnx.state(fresh)) == jax.tree.map(np.shape, nnx.state(model))


@pytest.mark.nightly
def test_rows_are_rounded_up_and_removed_at_the_end():
    model = build()
    assert model.resize_token_embeddings(pad_to_multiple_of=64).config.vocab_size == 64
    assert model.resize_token_embeddings(65, 64).config.vocab_size == 128
    assert model.resize_token_embeddings(60) is model
    fewer = model.resize_token_embeddings(50)
    np.testing.assert_array_equal(table(fewer), table(model)[:50])
    around_zero = table(model.resize_token_embeddings(5000, mean_resizing=False))[60:]
    np.testing.assert_allclose(around_zero.std(), model.config.initializer_range, rtol=0.05)


def test_impossible_numbers_of_rows_are_refused():
    model = build()
    for size, multiple in ((0, None), (-3, None), (True, None), (70, 0), (2**40, None)):
        with pytest.raises(ConfigError, match="must be 1 to"):
            model.resize_token_embeddings(size, multiple)


def test_new_rows_have_the_mean_and_a_small_part_of_the_covariance():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(500, 4)) @ rng.normal(size=(4, 4)) + 3
    rows = draw_rows(values.astype(np.float32), 20_000, seed=0).astype(np.float64)
    np.testing.assert_allclose(rows.mean(axis=0), values.mean(axis=0), atol=1e-5)
    centered = 1e4 * (rows - values.mean(axis=0))
    expected = 0.1 * np.cov(values.T, bias=True)
    np.testing.assert_allclose(np.cov(centered.T), expected, atol=0.05 * expected.max())
    constant = np.ones((8, 3), np.float32)
    np.testing.assert_array_equal(draw_rows(constant, 2, seed=0), np.ones((2, 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(1, 2, 1, 2, 1)])
def test_rows_of_sharded_and_quantized_tables_are_added(dims):
    whole = build(tie_word_embeddings=False).resize_token_embeddings(67)
    sharded = build(dims, tie_word_embeddings=False).resize_token_embeddings(67)
    np.testing.assert_array_equal(table(sharded), table(whole))
    np.testing.assert_allclose(logits(sharded), logits(whole), atol=1e-5)
    rules = {"dtype": "int8", "pattern": "embed_tokens|lm_head"}
    plain = build(tie_word_embeddings=False)
    codes = plain.quantize(rules).resize_token_embeddings(67)
    assert codes.is_quantized
    np.testing.assert_allclose(logits(codes)[..., :60], logits(plain.quantize(rules)), atol=2e-6)
    np.testing.assert_allclose(logits(codes), logits(whole), atol=0.05)


@pytest.mark.nightly
def test_adapters_contain_the_rows_that_were_added(tmp_path):
    base = build(tie_word_embeddings=False)
    model = base.resize_token_embeddings(67, seed=5)
    adapted = model.apply_lora(LoraSpec(rank=2, targets="q_proj"))
    for _, layer in lora_layers(adapted):
        layer.lora_b.set_value(layer.lora_b.get_value() + 0.3)
    adapted.save_pretrained(tmp_path)
    again = base.load_adapter(tmp_path)
    assert again.config.vocab_size == 67
    np.testing.assert_array_equal(logits(again, IDS + 7), logits(adapted, IDS + 7))
    with pytest.raises(ConfigError, match="before you add or load adapters"):
        adapted.resize_token_embeddings(70)
