"""Quantized experts: every method and mesh equals the result for plain matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.sharding import placement
from ed_layers.moe.experts import Experts
from ed_layers.moe.mesh import whole_groups
from ed_layers.parts import Parts
from ed_layers.quantization import dequantize, quantize
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_layers_moe import METHODS, RING, TENSOR, B, D, S, choices, config, context, randomized

E, K, F = 8, 2, 32
NF4 = {"dtype": "nf4", "group_size": 8}
CUT = {"dtype": "nf4", "group_size": 16}  # the groups of down_proj: two, which four devices cut
W8A8 = {"dtype": "w8a8", "group_size": 8}


def quantized(spec, **fields):
    module = randomized(Experts(Parts(config(**fields), nnx.Rngs(0)), E, F, bias=True))
    rules = [("down_proj", spec), ("", spec if spec is not CUT else NF4)]
    return quantize(module, rules)


def outputs(module, placed):
    """The output, and the gradients of inputs and of biases."""
    (chosen, weights), ctx = choices(E, K), context(placed)
    rng = np.random.default_rng(5)
    x, upstream = (jnp.asarray(rng.normal(size=(B, S, D)), jnp.float32) for _ in range(2))
    graphdef, learned, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def both(learned, rest, x):
        def total(learned, x):
            y = nnx.merge(graphdef, learned, rest)(x, chosen, weights, ctx)
            return jnp.sum(y * upstream), y

        return jax.grad(total, argnums=(0, 1), has_aux=True)(learned, x)

    (learned, dx), y = both(learned, rest, x)
    biases = {path: v.get_value() for path, v in nnx.to_flat_state(learned) if path[-1] == "bias"}
    return y, dx, biases


@functools.cache
def reference(name):
    """Return the plain matrices with the values of the codes."""
    plain = dequantize(quantized(SPECS[name], **METHODS["dense"]))
    return outputs(plain, None)


SPECS = {"nf4": NF4, "int8": {"dtype": "int8"}, "cut": CUT, "w8a8": W8A8}


def near(got, expected, bound):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=bound), got, expected)


def nightly(*case):
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_every_method_gives_the_numbers_of_plain_matrices(name, method):
    got = outputs(quantized(SPECS[name], **METHODS[method]), None)
    near(got, reference(name), 2e-5)


@pytest.mark.nightly
def test_quantized_activations_are_the_same_in_every_method():
    results = [outputs(quantized(W8A8, **fields), None) for fields in METHODS.values()]
    for got in results[1:]:
        near(got, results[0], 2e-5)
    error = np.abs(results[0][0] - reference("w8a8")[0]).max()
    assert 1e-3 < error < 0.2, "activations are quantized, and nearly what they were"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "method", "dims", "fields"),
    [
        ("nf4", "standard", (1, 1, 2, 2, 2), {}),
        ("nf4", "fused", (1, 2, 2, 2, 1), {}),
        nightly("nf4", "dense", (1, 8, 1, 1, 1), RING),
        nightly("int8", "fused", (2, 1, 1, 4, 1), {}),
        nightly("int8", "standard", (1, 2, 2, 2, 1), TENSOR),
        ("cut", "standard", (2, 1, 1, 4, 1), {}),
    ],
)
def test_many_devices_are_as_one(name, method, dims, fields):
    placed = config(dims, **fields)
    module = placement.shard(quantized(SPECS[name], **METHODS[method], **fields), placed)
    near(outputs(module, placed), reference(name), 3e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "dims"),
    [
        ("standard", (1, 1, 1, 1, 1)),
        nightly("fused", (1, 1, 1, 1, 1)),
        nightly("standard", (1, 1, 2, 2, 2)),
    ],
)
def test_simulated_quantized_experts_have_dequantized_gradients(method, dims):
    """The products of quantized ones, and the gradients of the plain ones at the rounded values."""

    def gradients(spec, method, dims):
        placed = config(dims, **METHODS[method])
        module = quantized(spec, **METHODS[method])
        module = dequantize(module) if spec is NF4 else module
        graphdef, learned, rest = nnx.split(placement.shard(module, placed), nnx.Param, ...)
        (chosen, weights), x = choices(E, K), jnp.ones((B, S, D)) * jnp.arange(D) / D
        total = lambda p: nnx.merge(graphdef, p, rest)(x, chosen, weights, context(placed)).sum()  # noqa: E731
        value, grads = jax.jit(jax.value_and_grad(total))(learned)
        return value, [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]

    value, grads = gradients({**NF4, "simulate": True}, method, dims)
    expected, of_plain = gradients(NF4, "dense", (1, 1, 1, 1, 1))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    near(grads, of_plain, 1e-4)


@pytest.mark.nightly
def test_a_mesh_cuts_no_group():
    """If one matrix cannot be split, no matrix is split."""

    def split(name):
        module = quantized(SPECS[name])
        layers = {"up_proj": module.up_proj, "down_proj": module.down_proj}
        params = {f"{k}.kernel": own.kernel.get_value() for k, own in layers.items()}
        axes = {f"{k}.kernel": own.kernel.get_metadata()["axes"] for k, own in layers.items()}
        specs = whole_groups(config((1, 1, 2, 4, 1)), params, axes)
        return specs["up_proj.kernel"], specs["down_proj.kernel"]

    assert split("nf4") == (P("ep", None, "tp"), P("ep", "tp", None))
    assert split("int8") == (P("ep", None, "tp"), P("ep", "tp", None)), "a scale is of a column"
    assert split("cut") == (P("ep", None, None), P("ep", None, None))
