"""Several products of one input in one call: exact, as each alone, with gradients, and one by one
where the library does not take them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.specs import LoraSpec
from ed_layers.activations import activation
from ed_layers.context import Ctx
from ed_layers.lora.layers import LoRALinear
from ed_layers.mlp import GatedMLP
from ed_layers.native import library, products
from ed_layers.native.products import Epilogue
from ed_layers.parts import Parts
from ed_layers.projections.linear import Linear, project, project_activated
from ed_layers.projections.matmul import matmul
from ed_layers.quantization import encode
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import DTYPES, anywhere, built, drawn, exact  # noqa: F401

#: Names of the projections of a gated layer for remat policies.
NAMES = "mlp_gate", "mlp_up"
FORMS = st.sampled_from([None, "int8", "int4", "nf4", "w8a8", "w4a8"])


def layer(seed: int, i: int, o: int, *, dtype: str = "float32", bias: bool = False) -> Linear:
    made = Linear(
        i,
        o,
        axes=(None, None),
        use_bias=bias,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
        kernel_init=jax.nn.initializers.normal(0.1),
        rngs=nnx.Rngs(seed),
    )
    if bias:
        made.bias.set_value(drawn(seed, o, dtype=dtype))
    return made


def calls(function, x: jax.Array) -> int:
    """Calls of the library's products in a program."""
    return jax.jit(function).lower(x).as_text().count("@ed_layers_")


@pytest.mark.nightly
@built
@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(1, 70),
    i=st.integers(1, 150),
    widths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    x_dtype=DTYPES,
    w_dtype=DTYPES,
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_product_is_exact_and_as_alone(n, i, widths, x_dtype, w_dtype, transposed, seed):
    x = drawn(seed, n, i, dtype=x_dtype)
    matrices = [drawn(seed + o, i, o, dtype=w_dtype) for o in widths]
    laid = [jnp.array(w.T) if transposed else w for w in matrices]
    found = products.products(x, laid, transposed=transposed)
    for y, w, as_it_lies in zip(found, matrices, laid, strict=True):
        expected, sizes = exact(x) @ exact(w), np.abs(exact(x)) @ np.abs(exact(w))
        rounded = 2**-8 * np.abs(expected) if x_dtype == "bfloat16" else 0
        assert (np.abs(exact(y) - expected) <= rounded + 2e-6 * sizes).all()
        alone = products.product(x, as_it_lies, transposed=transposed)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(alone))


@pytest.mark.nightly
@built
@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(1, 100),
    i=st.integers(1, 150),
    o=st.integers(1, 300),
    act=st.sampled_from(sorted(products.ACTS)),
    x_dtype=DTYPES,
    w_dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_biases_activations_and_gates_are_exact(n, i, o, act, x_dtype, w_dtype, seed) -> None:
    """Compare with float64, within the rounding of the separate products."""
    x = drawn(seed, n, i, dtype=x_dtype)
    gate, up = (drawn(seed + at, i, o, dtype=w_dtype) for at in (1, 2))
    bias = drawn(seed + 3, o, dtype=x_dtype)
    (y,) = products.products(x, (gate, up), epilogue=Epilogue(act=act, gated=True))
    left, right = (exact(a) for a in products.products(x, (gate, up)))
    # Rounding of the exponential and of its argument, in addition to rounding of the result.
    slack = (2**-8 if x_dtype == "bfloat16" else 1e-6) + 1e-6 * np.minimum(np.abs(left), 90) ** 2
    expected = EXACT_ACTS[products.ACTS[act]](left) * right
    assert (np.abs(exact(y) - expected) <= slack * np.abs(expected) + 1e-30).all()

    (biased,) = products.products(x, (gate,), epilogue=Epilogue((bias,), act))
    sums = exact(x) @ exact(gate) + exact(bias)
    expected = EXACT_ACTS[products.ACTS[act]](sums)
    sizes = np.abs(exact(x)) @ np.abs(exact(gate)) + np.abs(exact(bias))
    slack = 4e-6 * sizes + (2**-8 if x_dtype == "bfloat16" else 1e-6) * np.abs(expected)
    assert (np.abs(exact(biased) - expected) <= slack).all()


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


#: Activations in float64 by their numbers in the library.
EXACT_ACTS = {
    1: lambda x: x * sigmoid(x),
    2: lambda x: x * sigmoid(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)),
    3: lambda x: x * np.vectorize(math.erfc, otypes=[float])(-x / np.sqrt(2)) / 2,
    4: lambda x: x * sigmoid(1.702 * x),
    5: lambda x: np.maximum(x, 0),
}


@built
@pytest.mark.parametrize("used", [0, 1, 9, 70])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("epilogue", ["plain", "biased", "gated", "gated and biased"])
def test_rows_of_zeros_at_the_end_have_the_results_of_zeros(epilogue, dtype, used) -> None:
    x = drawn(0, 75, 130, dtype=dtype).at[used:].set(0)
    x = x.at[-1].set(-0.0)
    matrices = drawn(1, 130, 96, dtype=dtype), drawn(2, 130, 96, dtype=dtype)
    biases = (drawn(3, 96, dtype=dtype), drawn(4, 96, dtype=dtype))
    biases = biases if "biased" in epilogue else ()
    gated = "gated" in epilogue
    what = Epilogue(biases, "gelu" if biases or gated else None, gated)
    padded = products.products(x, matrices, epilogue=what)
    apart = x.at[-1, 0].set(1e-30)  # no row is omitted
    # Tiles sum 32 inputs at a time, and a few rows are multiplied without tiles.
    has_tiles = dtype == "bfloat16" and library.level() == "amx"
    rounded = {"rtol": 2**-7, "atol": 1e-6} if has_tiles else {"rtol": 0}
    for y, expected in zip(padded, products.products(apart, matrices, epilogue=what), strict=True):
        np.testing.assert_allclose(exact(y)[:-1], exact(expected)[:-1], **rounded)
        # The last row of `apart` has a number of 1e-30 instead of zeros.
        np.testing.assert_allclose(exact(y)[-1], exact(expected)[-1], atol=1e-6)


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "i", "o"), [(64, 33, 100), (65, 1500, 130), (700, 31, 64), (90, 4500, 16)]
)
def test_products_of_many_rows_are_exact_and_those_of_each_row(n, i, o, dtype) -> None:
    x, w = drawn(1, n, i, dtype=dtype), drawn(2, i, o, dtype=dtype)
    y = products.product(x, w)
    expected, sizes = exact(x) @ exact(w), np.abs(exact(x)) @ np.abs(exact(w))
    rounded = 2**-8 * np.abs(expected) if dtype == "bfloat16" else 0
    assert (np.abs(exact(y) - expected) <= rounded + 2e-6 * sizes).all()
    if dtype == "bfloat16" and library.level() == "amx":
        return  # tiles sum 32 inputs at a time
    for first, last in ((0, 1), (3, 20), (n - 33, n)):
        np.testing.assert_array_equal(
            exact(products.product(x[first:last], w)), exact(y[first:last])
        )


@built
def test_empty_sums_are_the_activation_of_the_bias() -> None:
    bias = drawn(0, 70)
    for n in (3, 100):
        (y,) = products.products(
            jnp.zeros((n, 0)), (jnp.zeros((0, 70)),), epilogue=Epilogue((bias,), "relu")
        )
        np.testing.assert_array_equal(y, jnp.broadcast_to(jax.nn.relu(bias), (n, 70)))


@pytest.mark.daily(
    "None-None", "None-silu", "int8-silu", "w8a8-None", "w8a8-silu", "w4a8-None", "w4a8-silu"
)
@built
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("form", [None, "int8", "w8a8", "w4a8"])
def test_a_row_does_not_depend_on_its_company(form, act) -> None:
    x = drawn(0, 40, 130)
    layers = [layer(seed, 130, 330) for seed in (1, 2)]
    if form is not None:
        quantize(layers, form)

    def both(x: jax.Array) -> np.ndarray:
        found = (
            project(layers, x) if act is None else [project_activated(layers[:2], act, x, NAMES)]
        )
        return np.concatenate([np.asarray(y) for y in found], axis=1)

    whole = both(x)
    for first, last in ((0, 1), (3, 5), (7, 16), (20, 40)):
        np.testing.assert_array_equal(both(x[first:last]), whole[first:last])


def quantize(layers: list[Linear], form: str) -> None:
    name = {"w8a8": "int8", "w4a8": "int4"}.get(form, form)
    for of in layers:
        w = encode(of.kernel.get_value(), name, 26, activations=name != form)
        setattr(of, "kernel", nnx.Param(w, axes=(None, None)))  # noqa: B010 - as quantizing does


@pytest.mark.nightly
@built
@settings(max_examples=6, deadline=None)
@given(form=FORMS, dtype=DTYPES, bias=st.booleans(), n=st.integers(1, 64), seed=st.integers(0, 99))
def test_layers_together_are_the_layers(form, dtype, bias, n, seed) -> None:
    """To the bit; several widths, matrices plain or quantized."""
    layers = [layer(seed + o, 130, o, dtype=dtype, bias=bias) for o in (260, 130, 390)]
    if form is not None:
        quantize(layers, form)
    x = drawn(seed, 1, n, 130, dtype=dtype)
    assert calls(lambda x: project(layers, x), x) == 1
    for y, of in zip(project(layers, x), layers, strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(of(x)))


@pytest.mark.nightly
@built
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("act", [None, "silu", "gelu"])
def test_gradients_are_those_of_plain_products(form, act, monkeypatch) -> None:
    layers = [layer(seed, 130, 260) for seed in (1, 2)]
    if form is not None:
        quantize(layers, form)
    graphdef, state = nnx.split(layers)

    def loss(kernels, x):
        own = nnx.merge(graphdef, kernels)
        if act is None:
            return sum(jnp.sum(jnp.sin(y)) for y in project(own, x))
        inner = project_activated(own[:2], act, x, NAMES)
        if inner is None:
            inner = activation(act)(own[0](x)) * own[1](x)
        return jnp.sum(jnp.sin(inner))

    def gradients():
        if form is not None:
            return jax.grad(lambda x: loss(state, x))(drawn(3, 5, 130))
        return jax.grad(loss, argnums=(0, 1))(state, drawn(3, 5, 130))

    ours = gradients()
    monkeypatch.setenv(library.VARIABLE, "0")
    # Sums of 130 and of 260 terms of size 1, in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, gradients())


@built
@pytest.mark.parametrize("n", [1, 64, 65, 300])
def test_products_of_any_number_of_rows_use_the_library(n) -> None:
    for dtype in ("float32", "bfloat16"):
        for transposed in (False, True):
            x, w = (jnp.zeros(shape, dtype) for shape in ((n, 130), (130, 130)))
            taken = calls(lambda x, w=w, t=transposed: matmul(x, w, transposed=t), x)
            assert taken == 1, (dtype, transposed)


@built
def test_a_gated_layer_is_two_calls() -> None:
    config = SimpleNamespace(hidden_size=130, hidden_act="silu", use_scan_mlp=False)
    mlp = GatedMLP(Parts(config, nnx.Rngs(0)), 260)
    x = drawn(0, 1, 3, 130)
    ctx = Ctx(jnp.zeros((1, 3), jnp.int32), {})
    assert calls(lambda x: mlp(x, ctx), x) == 2
    inner = jax.nn.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    np.testing.assert_allclose(mlp(x, ctx), mlp.down_proj(inner), rtol=1e-5, atol=1e-7)


@pytest.mark.daily("off")
@pytest.mark.parametrize("reason", ["off", "adapter", "act", "one bias"])
def test_unsupported_gated_projection_is_not_fused(reason, monkeypatch) -> None:
    gate, up = (layer(seed, 130, 260, bias=reason == "one bias" and seed == 1) for seed in (1, 2))
    x = drawn(0, 3, 130)
    if reason == "off":
        monkeypatch.setenv(library.VARIABLE, "0")
    if reason == "adapter":
        gate = LoRALinear(gate, LoraSpec(rank=4), jax.random.key(0))
    assert project_activated((gate, up), "mish" if reason == "act" else "silu", x, NAMES) is None
    for y, of in zip(project((gate, up), x), (gate, up), strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(of(x)))


@built
@pytest.mark.parametrize("bias", [False, True])
def test_activated_projection_is_one_call_and_has_gradients(bias) -> None:
    up, x = layer(1, 130, 260, bias=bias), drawn(0, 90, 130)

    def ours(x: jax.Array) -> jax.Array:
        y = project_activated((up,), "quick_gelu", x, ("mlp_up",))
        assert y is not None
        return y

    def plain(x: jax.Array) -> jax.Array:
        return activation("quick_gelu")(up(x))

    assert calls(ours, x) == 1
    np.testing.assert_allclose(ours(x), plain(x), rtol=1e-5, atol=1e-6)
    of_ours, of_plain = (jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (ours, plain))
    np.testing.assert_allclose(of_ours, of_plain, rtol=1e-4, atol=2e-5)
