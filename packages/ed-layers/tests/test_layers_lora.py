"""Adapters of experts, and adapters that are served by slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.sharding import placement
from ed_infra.specs import LoraSpec
from ed_layers.context import Ctx
from ed_layers.lora.layers import LoRAExperts, adopt
from ed_layers.lora.slots import LoRASlots, write_slot
from ed_layers.moe.experts import Experts
from ed_layers.parts import Parts
from ed_layers.projections.linear import ExpertLinear
from flax import nnx

B, S, D, F, E, K = 4, 8, 16, 24, 8, 3
SPEC = LoraSpec(rank=3, alpha=6.0)
METHODS = {
    "fused": {"moe_method": "fused_moe", "moe_force_xla_gmm": True},
    "standard": {"moe_method": "standard_moe"},
    "dense": {"moe_method": "dense_moe"},
}


class Config(EasyDeLBaseConfig):
    hidden_act: str = "silu"
    initializer_range: float = 0.3
    use_bias: bool = False


def config(dims=(1, 1, 1, 1, 1), **fields):
    sizes: dict[str, Any] = {"hidden_size": D, "num_attention_heads": 2}
    return Config(**sizes, sharding_axis_dims=dims, **fields)


def noisy(module, seed=1):
    """Give every parameter a different value, because B starts at zero."""
    state = nnx.state(module)
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(state))))
    nnx.update(module, jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape) * 0.3, state))
    return module


def replaced(module, to):
    """The experts with each of their layers replaced."""
    new: Any = nnx.Module()
    new.__class__ = Experts
    adopt(new, module)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(new, name, to(getattr(module, name)))
    return new


def adapted(placed, **fields):
    module = noisy(Experts(Parts(config(**fields), nnx.Rngs(0)), E, F, bias=True))
    module = noisy(replaced(module, lambda own: LoRAExperts(own, SPEC, jax.random.key(2))))
    return placement.shard(module, placed)


def outputs(module, placed):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(B, S, D)), jnp.float32)
    chosen = jnp.asarray(np.argsort(rng.random((B, S, E)), axis=-1)[..., :K], jnp.int32)
    weights = jnp.asarray(rng.random((B, S, K)), jnp.float32)
    ctx = Ctx(jnp.zeros((B, S), jnp.int32), {}, config=placed)
    graphdef, learned, rest = nnx.split(module, nnx.LoRAParam, ...)

    @jax.jit
    def both(learned, rest, x):
        def total(learned, x):
            y = nnx.merge(graphdef, learned, rest)(x, chosen, weights, ctx)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        return jax.grad(total, argnums=(0, 1), has_aux=True)(learned, x)

    (learned, dx), y = both(learned, rest, x)
    return y, dx, learned


@pytest.fixture(scope="module")
def reference():
    return outputs(adapted(config(), **METHODS["dense"]), config())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "dims", "fields"),
    [
        ("standard", (1, 1, 1, 1, 1), {}),
        ("fused", (1, 1, 1, 1, 1), {}),
        ("standard", (1, 1, 2, 2, 2), {}),
        ("fused", (1, 2, 2, 2, 1), {}),
        ("dense", (1, 8, 1, 1, 1), {"use_ring_of_experts": True}),
        ("standard", (2, 1, 1, 4, 1), {"use_expert_tensor_mode": True}),
    ],
)
def test_adapters_of_experts_in_every_method_and_mesh(reference, method, dims, fields):
    placed = config(dims, **fields)
    got = outputs(adapted(placed, **METHODS[method], **fields), placed)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-5), got, reference
    )


@pytest.mark.nightly
def test_expert_adapters_match_their_merged_experts(reference):
    module = adapted(config(), **METHODS["standard"])
    merged = replaced(module, LoRAExperts.merge_adapter)
    np.testing.assert_allclose(outputs(merged, config())[0], reference[0], atol=1e-5)
    base = replaced(module, LoRAExperts.base)
    assert type(base.up_proj) is ExpertLinear
    assert np.abs(outputs(base, config())[0] - reference[0]).max() > 1e-2
    np.testing.assert_array_equal(base.up_proj.kernel[...], module.up_proj.kernel[...])


@pytest.mark.parametrize("spec", [LoraSpec(dropout=0.1), LoraSpec(dora=True)])
def test_expert_adapters_reject_dropout_and_dora(spec):
    base = Experts(Parts(config(), nnx.Rngs(0)), 2, F).up_proj
    with pytest.raises(ConfigError, match="leave experts out"):
        LoRAExperts(base, spec, jax.random.key(0))


def linear_and_slots(slots=3, rank=4):
    parts = Parts(config(), nnx.Rngs(0))
    linear = noisy(parts.linear(D, F, axes=("embed", "mlp"), bias=True))
    return linear, LoRASlots(linear, slots, rank)


@pytest.mark.daily("shape1-ids1")
@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        ((1, 6, D), [[0, 2, 1, 3, 0, 2]]),  # a flat batch
        ((6, D), [[0, 2, 1, 3, 0, 2]]),
        ((1, 6, 2, D), [[0, 2, 1, 3, 0, 2]]),  # several rows of a token
        ((3, 2, D), [[3], [0], [1]]),  # a dense batch, an adapter for each row
    ],
)
def test_each_token_has_the_adapter_of_its_slot(shape, ids):
    linear, served = linear_and_slots()
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, D, 2)), rng.normal(size=(3, 2, F))
    for slot in (1, 2, 3):  # a rank below the slots'
        for name, value, pad in (("a", a, ((0, 0), (0, 2))), ("b", b, ((0, 2), (0, 0)))):
            leaf = getattr(served, f"lora_{name}")
            value = jnp.asarray(np.pad(value[slot - 1], pad))
            leaf.set_value(write_slot(leaf.get_value(), jnp.asarray(slot), value))
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    ids = np.asarray(ids)
    got = np.asarray(served(x, Ctx(jnp.zeros((1, 1)), {}, adapter_ids=jnp.asarray(ids))))
    alone = np.asarray(linear(x)).astype(np.float64)
    for at in np.ndindex(shape[:-1]):
        slot = ids[0, at[0]] if len(shape) == 2 else ids[at[0], min(at[1], ids.shape[1] - 1)]
        if slot == 0:
            np.testing.assert_array_equal(got[at], np.asarray(linear(x))[at])
            continue
        change = np.asarray(x[at], np.float64) @ a[slot - 1] @ b[slot - 1]
        np.testing.assert_allclose(got[at], alone[at] + change, atol=2e-5)


def test_gain_of_a_slot_scales_the_outputs_of_its_tokens_without_the_bias():
    linear, served = linear_and_slots()
    rng = np.random.default_rng(1)
    gain = jnp.asarray(rng.normal(size=(1, F)), jnp.float32)
    leaf = served.lora_gain
    leaf.set_value(write_slot(leaf.get_value(), jnp.asarray(2), gain))
    x = jnp.asarray(rng.normal(size=(1, 3, D)), jnp.float32)
    plain = linear(x)
    ids = jnp.asarray([[0, 2, 1]])
    y = served(x, Ctx(jnp.zeros((1, 1)), {}, adapter_ids=ids))
    bias = linear.bias.get_value()
    expected = plain.at[0, 1].set((plain[0, 1] - bias) * gain[0] + bias)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_array_equal(y[0, ::2], plain[0, ::2])


def test_a_layer_with_slots_needs_its_tokens():
    _, served = linear_and_slots()
    with pytest.raises(AssertionError, match="without_tokens"):
        served(jnp.zeros((1, 2, D)))
    with pytest.raises(AssertionError, match="no tokens of"):
        served(jnp.zeros((4, 2, D)), Ctx(jnp.zeros((1, 1)), {}, adapter_ids=jnp.zeros((1, 3))))
