"""A model on a CPU uses the native library, unless its configuration disables it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers import native
from ed_layers.native import library
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

FIELDS = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
IDS = jnp.arange(10).reshape(2, 5)


@pytest.mark.nightly
@pytest.mark.skipif(library.level() is None, reason="the native library is not built")
@pytest.mark.proves("native_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_kernels_option_disables_native_kernels(dtype, monkeypatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "1")
    results, programs = [], []
    for choice in (True, False):
        config = LlamaConfig(**FIELDS, native_kernels=choice)
        model = LlamaForCausalLM.create(config, seed=0, dtype=dtype, param_dtype=dtype)
        graphdef, state = nnx.split(model)

        def step(state, cache, graphdef=graphdef):
            out = nnx.merge(graphdef, state)(IDS, past_key_values=cache)
            return out.logits, out.past_key_values

        arguments = (state, model.init_cache(2, 8))
        programs.append(str(jax.make_jaxpr(step)(*arguments)))
        results.append(np.asarray(jax.jit(step)(*arguments)[0]))
    for name in ("product", "attention_cached", *(["put"] if dtype == "bfloat16" else [])):
        assert f"ed_layers_{name}" in programs[0]
    assert "ed_layers_" not in programs[1]
    size = np.abs(results[1]).max()
    np.testing.assert_allclose(*results, atol=size * (1e-5 if dtype == "float32" else 3e-2))
    with native.chosen_by(config):
        assert "turned off by native_kernels" in native.describe()
