"""The logits with a cache do not depend on the size of the chunks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_infra.testing import tiny_llama
from ed_layers.cache import DenseCache, Format, HybridCache, LayerCacheSpec, PagedCache
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

ONE = (1, 1, 1, 1, 1)
B, S = 2, 20
IDS = np.random.default_rng(0).integers(3, 256, (B, S)).astype(np.int32)
STEPS = {"by_token": [1] * S, "chunks": [8, 1, 1, 1, 8, 1], "at_once": [S]}
# Largest difference of a logit from that of the unquantized cache, relative to the largest logit.
BOUNDS = {"int8": 0.02, "fp8": 0.08}


def model_of(**changes: Any) -> LlamaForCausalLM:
    fields = tiny_llama(num_hidden_layers=2, initializer_range=0.08)
    del fields["model_type"]
    config = LlamaConfig(**{**fields, "sharding_axis_dims": ONE, **changes})
    return LlamaForCausalLM.create(config, seed=1)


def logits(model: LlamaForCausalLM, steps: list[int]) -> np.ndarray:
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, past_key_values=cache))
    cache, outs, at = model.init_cache(B, 24), [], 0
    for n in steps:
        out = step(state, IDS[:, at : at + n], cache)
        cache, at = out.past_key_values, at + n
        outs.append(np.asarray(out.logits))
    return np.concatenate(outs, axis=1)


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    ids: Any = IDS
    return np.asarray(jax.jit(lambda: model_of()(ids).logits)())


@pytest.mark.nightly
@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_decode_attention_gives_the_logits_of_the_plain_forward(plain, scan_layers):
    model = model_of(decode_attn_mechanism="autoregressive_decodeattn", scan_layers=scan_layers)
    for steps in STEPS.values():
        np.testing.assert_allclose(logits(model, steps), plain, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.proves("kv_cache_quantization_config")
@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_quantized_cache_logits_stay_within_error_bound(plain, dtype, record_property):
    """Stored in 8 bits; the same logits however the tokens come, and near to the unquantized."""
    quantized = {"kv_cache_quantization_config": {"dtype": dtype}}
    model = model_of(**quantized, scan_layers=False)
    cache: Any = model.init_cache(B, 24)
    assert cache.keys[0].values.dtype.itemsize == 1
    found = {name: logits(model, steps) for name, steps in STEPS.items()}
    for other in ("by_token", "chunks"):
        np.testing.assert_allclose(found[other], found["at_once"], atol=1e-5)
    error = float(np.abs(found["at_once"] - plain).max() / np.abs(plain).max())
    assert 1e-5 < error <= BOUNDS[dtype]
    record_property(
        "summary",
        f"cache in {dtype}: logits off by {error:.1e} of the largest (<= {BOUNDS[dtype]})",
    )


@pytest.mark.nightly
def test_the_end_of_a_cache():
    """Overflow of a cache raises an error if lengths are known, and returns NaN otherwise."""
    model = model_of()
    ids: Any = IDS[:, :5]
    cache = model(ids[:, :4], past_key_values=model.init_cache(B, 4)).past_key_values
    with pytest.raises(ValueError, match=r"a row gets 5 tokens in a cache for 4.*max_length=5"):
        model(ids[:, 4:], past_key_values=cache)
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, past_key_values=cache))
    short = jax.numpy.asarray([[1, 1, 1, 1], [0, 1, 1, 1]])
    fresh = model.init_cache(B, 4)
    cache = model(ids[:, :4], attention_mask=short, past_key_values=fresh).past_key_values
    out = np.asarray(step(state, ids[:, 4:], cache).logits)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all(), "the other row has one place left"


@pytest.mark.nightly
def test_a_format_that_is_none_for_caches():
    with pytest.raises(ConfigError, match="8-bit formats: int8, fp8"):
        model_of(kv_cache_quantization_config={"dtype": "mxfp4"})
    with pytest.raises(ConfigError, match="8-bit formats: int8, fp8"):
        Format.of(EasyDeLQuantizationConfig("gguf"))


@pytest.mark.parametrize("method", ["nf4", "8bit", "a8bit", "a8q", "a4q"])
def test_methods_of_the_documents_store_a_cache_in_eight_bits(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget_said()
    given = {"quantization_method": method, "group_size": 128}
    with caplog.at_level("WARNING", logger="easydel"):
        config = EasyDeLBaseConfig(kv_cache_quantization_config=given)
    cache_format = Format.of(config.kv_cache_quantization_config)
    assert cache_format == Format("int8", 128)
    four_bits = method in ("nf4", "a4q")
    assert (
        "is stored as int8: a cache of keys and values has no format of 4 bits" in caplog.text
    ) == four_bits
    assert four_bits or not caplog.text


def test_group_that_does_not_divide_a_head_becomes_the_head(caplog: pytest.LogCaptureFixture):
    forget_said()
    numbers = np.random.default_rng(0).normal(size=(2, 3, 64)).astype(np.float32)
    with caplog.at_level("WARNING", logger="easydel"):
        codes = Format("int8", 128).encode(numbers)
    whole = Format("int8").encode(numbers)
    np.testing.assert_array_equal(codes.values, whole.values)
    np.testing.assert_array_equal(codes.scale, whole.scale)
    assert "group_size 128 does not divide the 64 numbers of a head" in caplog.text
    assert "Choose a divisor of 64" in caplog.text
    assert Format("int8", 16).groups(64) == 4


@pytest.mark.nightly
@pytest.mark.proves("init_operations_cache")
def test_the_cache_that_a_model_needs():
    model = model_of()
    assert isinstance(model.init_operations_cache(2, 24), DenseCache)
    paged: Any = model_of(attn_mechanism="ragged_page_attention_v3").init_operations_cache(
        2, 24, page_size=8
    )
    assert isinstance(paged, PagedCache)
    assert (paged.num_pages, paged.page_size) == (6, 8)
    groups, size = model.config.num_key_value_heads, model.config.head_dim
    full, near = LayerCacheSpec(groups, size), LayerCacheSpec(groups, size, window=8)
    model.model.cache_specs = lambda: [near, full]  # type: ignore[method-assign]
    mixed: Any = model.init_operations_cache(2, 24)
    assert isinstance(mixed, HybridCache)
    assert mixed.caches["window"].keys.shape[-2] == 8
    pools: Any = model.init_paged_cache({"window": 3, "full": 5}, 4)
    assert {name: pool.num_pages for name, pool in pools.caches.items()} == {"window": 3, "full": 5}
