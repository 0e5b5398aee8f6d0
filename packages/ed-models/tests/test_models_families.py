"""Properties of families outside of the conformance suite: dropout, and rejected fields."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_layers.context import Ctx
from ed_models.conformance import CHECKS, ONE, TINY, Cases, forward, subjects
from ed_models.families import bamba, bloom, falcon, glm_moe_dsa, gpt2, mpt, openelm, opt, phi
from flax import nnx

from tests.conformance.cases import cases

GPT2 = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}

OPENELM = {
    "num_transformer_layers": 1,
    "num_query_heads": [4],
    "num_kv_heads": [2],
    "ffn_multipliers": [1.0],
}


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (gpt2.GPT2Config, {"add_cross_attention": True}, "add_cross_attention"),
        (opt.OPTConfig, {"layerdrop": 0.1}, "layerdrop"),
        (mpt.MptConfig, {"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln"),
        (falcon.FalconConfig, {"new_decoder_architecture": True, "parallel_attn": False}, "paral"),
        (bloom.BloomConfig, {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact"),
        (openelm.OpenELMConfig, {"num_query_heads": [4, 4]}, "num_query_heads has 2 entries"),
        (openelm.OpenELMConfig, {**OPENELM, "ffn_with_glu": False}, "ffn_with_glu"),
        (glm_moe_dsa.GlmMoeDsaConfig, {"indexer_types": ["full", "shared"] * 39}, "first is 1,"),
    ],
)
def test_unsupported_family_options_raise_config_error(make, fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**fields)


def test_mpt_ignores_expansion_ratio_as_transformers_does() -> None:
    torch_modeling = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    config = mpt.MptConfig(
        d_model=32, n_heads=4, n_layers=1, vocab_size=48, expansion_ratio=2, sharding_axis_dims=ONE
    )
    model = mpt.MptForCausalLM.create(config, seed=0)
    width = torch_modeling.MptMLP(config).up_proj.out_features
    kernels = [v for path, v in nnx.to_flat_state(nnx.state(model)) if "up_proj" in path]
    assert [kernel.shape[-2:] for kernel in kernels] == [(32, width)]


@pytest.mark.nightly
def test_bambas_loss_of_normalisers_is_of_tokens_alone() -> None:
    config = bamba.BambaConfig(
        **{**TINY, "num_hidden_layers": 1},
        mamba_n_heads=4,
        mamba_d_state=4,
        attn_layer_indices=[0],
        z_loss_coefficient=0.5,
        sharding_axis_dims=ONE,
    )
    model, ids = bamba.BambaForCausalLM.create(config, seed=0), np.arange(24).reshape(2, 12)
    mask = np.ones((2, 12), np.int32)
    mask[1, :7] = 0
    out = forward(model, input_ids=ids, attention_mask=mask)
    logz = np.asarray(jax.nn.logsumexp(out.logits, axis=-1))[mask != 0]
    np.testing.assert_allclose(out.losses["logits_z"].value, 0.5 * (logz**2).mean(), rtol=1e-5)
    cached = forward(model, input_ids=ids, past_key_values=model.init_cache(2, 16))
    assert not cached.losses


@pytest.mark.nightly
def test_alibi_over_a_cache_whose_heads_and_slots_are_split() -> None:
    config = mpt.MptConfig(
        initializer_range=0.2,
        vocab_size=160,
        d_model=32,
        n_layers=2,
        n_heads=4,
        sharding_axis_dims=(1, 1, 1, 2, 2),
        use_sharded_kv_caching=True,
    )
    model, ids = mpt.MptForCausalLM.create(config, seed=0), np.arange(48).reshape(2, 24)
    cache, at, parts = model.init_cache(2, 32), 0, []
    for n in (16, 1, 7):
        out = forward(model, input_ids=ids[:, at : at + n], past_key_values=cache)
        cache, at = out.past_key_values, at + n
        parts.append(out.logits)
    whole = forward(model, input_ids=ids).logits
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)


# The conformance cases of OPT have no biases, because the gradient of one bias is zero.
OPT_WITH_BIASES = {
    "opt": Cases(
        {name: {**fields, "enable_bias": True} for name, fields in cases("opt")["opt"].rows.items()}
    )
}


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("subject", subjects(OPT_WITH_BIASES), ids=str)
def test_opt_with_biases_passes_conformance(subject) -> None:
    for check in ("parity", "cache", "saved"):
        CHECKS[check](subject)


@pytest.mark.nightly
@pytest.mark.parametrize("rate", ["resid_pdrop", "embd_pdrop", "attn_pdrop"])
def test_each_dropout_of_a_configuration_acts_in_training_only(rate) -> None:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    logits = {}
    for scan in (True, False):
        config = gpt2.GPT2Config(
            **GPT2, **{**none, rate: 0.5}, scan_layers=scan, sharding_axis_dims=ONE
        )
        model = gpt2.GPT2LMHeadModel.create(config, seed=0)
        ids = np.arange(48).reshape(2, 24)
        still, first, again, other = (
            model(ids, key=key).logits for key in (None, *map(jax.random.key, (1, 1, 2)))
        )
        np.testing.assert_array_equal(first, again)
        assert jnp.abs(first - still).max() > 1e-4
        assert jnp.abs(first - other).max() > 1e-4
        logits[scan] = first
    np.testing.assert_allclose(logits[True], logits[False], atol=1e-5)


@pytest.mark.nightly
def test_embedding_dropout_preserves_the_mean() -> None:
    config = phi.PhiConfig(**TINY, embd_pdrop=0.25, sharding_axis_dims=ONE)
    model = phi.PhiForCausalLM.create(config, seed=0).model
    ctx = Ctx(position_ids=jnp.zeros((4, 64), jnp.int32), rope={}, key=jax.random.key(0))
    seen = np.asarray(model.enter(jnp.ones((4, 64, 32)), ctx))
    np.testing.assert_allclose(np.unique(seen), [0, 4 / 3], rtol=1e-6)
    assert abs(seen.mean() - 1) < 0.03
