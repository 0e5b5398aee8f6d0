"""Gemma 4: layers that read another layer's keys and values keep nothing, in all three lives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_layers.cache import DenseCache, HybridCache, WindowCache
from ed_layers.cache.shared import SharedKeys
from ed_models.families.gemma4_text import Gemma4TextConfig, Gemma4TextForCausalLM
from flax import nnx

from tests.conformance import cases

FIELDS = cases.fields("gemma4_text", "shared keys, inputs of layers")
ONE = (1, 1, 1, 1, 1)
IDS = np.random.default_rng(0).integers(3, 160, (2, 12)).astype(np.int32)


def create(**fields):
    config = Gemma4TextConfig(**{**FIELDS, **fields}, sharding_axis_dims=ONE)
    return Gemma4TextForCausalLM.create(config, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, False])
def test_layers_that_share_keep_nothing(scan):
    model = create(scan_layers=scan)
    assert [spec != () for spec in model.cache_specs()] == [True] * 3 + [False] * 3
    cache = model.init_cache(2, 20)
    assert isinstance(cache, HybridCache)
    full, window = cache.caches["full"], cache.caches["window"]
    assert isinstance(full, DenseCache) and isinstance(window, WindowCache)
    # [b, g, t, k]: one full layer with other heads, two with a window.
    shapes = {
        name: [x.shape for x in jax.tree.leaves(keys)]
        for name, keys in (("full", full.keys), ("window", window.keys))
    }
    own, other = (2, 2, 20, 16), (2, 2, 6, 8)
    if scan:
        assert shapes == {"full": [(1, *own)], "window": [(2, *other)]}
    else:
        assert shapes == {"full": [own], "window": [other, other]}


@pytest.mark.nightly
def test_a_policy_by_names_sees_layers_that_read_others():
    plain = create()
    named = create(
        gradient_checkpointing="save_only_these_names",
        gradient_checkpointing_targets=("attn_key", "attn_query"),
    )
    losses = []
    for model in (plain, named):
        graphdef, params, other = model.split_module()

        def loss(params, graphdef=graphdef, other=other):
            return nnx.merge(graphdef, params, other).compute_loss(IDS)[0].loss

        losses.append(jax.jit(jax.grad(loss))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), losses[0], losses[1])


@pytest.mark.nightly
def test_unsupported_gemma4_inputs_raise_error():
    model = create()
    with pytest.raises(ValueError, match="pass input_ids"):
        model(inputs_embeds=jnp.zeros((1, 4, 32)))
    with pytest.raises(ConfigError, match="is an encoder"):
        create(use_bidirectional_attention="all")
    with pytest.raises(ValueError, match="no layer of group 'full' before it shares"):
        SharedKeys(None, {}, (1, 2)).update(3, None)
