"""Sums in one order: equal rows have equal bits in every batch, chunk and part of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_infra.specs import EasyDeLQuantizationConfig, LoraSpec
from ed_layers import fixed_order, sums
from ed_layers.activations import activation
from ed_layers.attention.kernel import Paged, Projected
from ed_layers.attention.kernels import native
from ed_layers.attention.scoring import Alibi, Scoring
from ed_layers.cache.protocol import Pages
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.depth.remat import names_in
from ed_layers.lora.layers import LoRALinear
from ed_layers.native import library
from ed_layers.ordered_program import call_ordered, exp, round_operations, round_to_dtype
from ed_layers.projections.linear import Linear, project, project_activated
from ed_layers.projections.matmul import matmul
from ed_layers.quantization.model import quantize
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

pytestmark = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)
ONE = EasyDeLBaseConfig(batch_invariant=True, sharding_axis_dims=(1, 1, 1, 1, 1))
PLAIN = EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 1, 1), native_kernels=False)
MESH = EasyDeLBaseConfig(batch_invariant=True, sharding_axis_dims=(2, 2, 1, 2, 1))


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [("fsdp", "tp"), ("tp", "fsdp"), (None, None)])
def test_product_on_a_mesh_has_the_bits_of_each_row_alone(spec, dtype: str) -> None:
    x, w = drawn(8, 40, dtype=dtype), drawn(40, 24, seed=1, dtype=dtype)
    with fixed_order.chosen_by(ONE):
        alone = [np.asarray(jax.jit(matmul)(x[i : i + 1], w), np.float32)[0] for i in range(8)]
        together = np.asarray(jax.jit(matmul)(x, w), np.float32)
    np.testing.assert_array_equal(together, alone)

    def on_mesh(x: jax.Array, w: jax.Array) -> jax.Array:
        with fixed_order.chosen_by(MESH):
            return matmul(x, w)

    placed = (
        jax.device_put(x, NamedSharding(MESH.mesh, PartitionSpec(("dp", "fsdp")))),
        jax.device_put(w, NamedSharding(MESH.mesh, PartitionSpec(*spec))),
    )
    compiled = jax.jit(on_mesh).lower(*placed).compile()
    np.testing.assert_array_equal(np.asarray(compiled(*placed), np.float32), alone)
    assert "all-reduce" not in compiled.as_text()


@pytest.mark.nightly
def test_sums_of_a_row_do_not_depend_on_the_other_rows() -> None:
    x = drawn(5, 300)
    with fixed_order.chosen_by(ONE):
        for reduce in (sums.total, sums.mean, sums.logsumexp):
            together = np.asarray(jax.jit(lambda x, reduce=reduce: reduce(x))(x))
            alone = np.asarray(jax.jit(lambda x, reduce=reduce: reduce(x))(x[3:4]))
            np.testing.assert_array_equal(together[3:4], alone)
        np.testing.assert_allclose(sums.logsumexp(x), jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
        gradient = jax.grad(lambda x: sums.logsumexp(x).sum())(x)
    np.testing.assert_allclose(gradient, jax.nn.softmax(x), atol=1e-6)
    assert not fixed_order.active()


@pytest.mark.nightly
def test_sums_by_additions_do_not_depend_on_the_other_rows() -> None:
    a = drawn(5, 3 * 37).reshape(5, 3, 37)
    with fixed_order.chosen_by(ONE):
        call_ordered(lambda: sums.over_axis(a, 1))
        np.testing.assert_allclose(sums.over_axis(a, 1), a.sum(1), rtol=1e-5, atol=1e-5)
        together = np.asarray(jax.jit(lambda a: sums.over_axis(a, 2))(a))
        alone = np.asarray(jax.jit(lambda a: sums.over_axis(a, 2))(a[3:4]))
        gradient = jax.grad(lambda a: (sums.over_axis(a, 2) ** 2).sum())(a)
    np.testing.assert_allclose(together, a.sum(2), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(alone, together[3:4])
    expected = np.broadcast_to(2 * a.sum(2, keepdims=True), a.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_ordinary_gradients_belong_to_values_in_one_order() -> None:
    x = drawn(5, 300)

    def squares(x):
        square = round_to_dtype(jax.lax.stop_gradient(x * x))
        return fixed_order.with_ordinary_gradient(square, lambda: jnp.cumsum(x * x, 1)).sum()

    with fixed_order.chosen_by(ONE):
        value, gradient = jax.jit(jax.value_and_grad(squares))(x)
        call_ordered(lambda: fixed_order.with_ordinary_gradient(x, lambda: jnp.cumsum(x, 1)))
    np.testing.assert_allclose(value, (x * x).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x * np.arange(300, 0, -1), rtol=1e-5)


@pytest.mark.nightly
def test_exponential_does_not_depend_on_the_number_of_elements() -> None:
    x = jnp.linspace(-87.2, 88.7, 4001, dtype=jnp.float32)
    with fixed_order.chosen_by(ONE):
        compiled = jax.jit(exp)
        whole = np.asarray(compiled(x))
        for size in (1, 2, 3, 5, 7, 11):
            np.testing.assert_array_equal(compiled(x[:size]), whole[:size])
        limits = exp(jnp.array([0, -jnp.inf, jnp.inf, jnp.nan]))
        assert jax.grad(exp)(1.5) == pytest.approx(np.exp(1.5))
    np.testing.assert_allclose(whole, np.exp(np.asarray(x, np.float64)), rtol=1.2e-7)
    np.testing.assert_array_equal(limits, [1, 0, np.inf, np.nan])


def test_sum_that_xla_orders_is_refused_with_its_place() -> None:
    x, w = drawn(4, 40), drawn(40, 24)

    def ordered() -> jax.Array:
        pair = jnp.sum(x.reshape(-1, 2), axis=-1)  # two numbers have one sum
        unused = jnp.sum(x)
        del unused
        return sums.softmax(matmul(x, w)) + pair[0]

    with fixed_order.chosen_by(ONE):
        call_ordered(ordered)
        with pytest.raises(ConfigError, match=r"dot_general of .*by_rows.* in test_layers_fixed"):
            call_ordered(lambda: by_rows(x, w))


def by_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: jnp.dot(row, w), x)


def multiply_and_add(x: jax.Array) -> jax.Array:
    return x * x + 0.3 * x - 1


#: Call -> function of rows that calls `multiply_and_add`, directly or in an operation with a body.
CALLS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "direct": multiply_and_add,
    "jit": jax.jit(multiply_and_add),
    "checkpoint": jax.checkpoint(multiply_and_add),
    "scan": lambda x: jax.lax.map(multiply_and_add, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] < 9, multiply_and_add, jnp.zeros_like, x),
}


@pytest.mark.parametrize(
    ("call", "dtype"), [("direct", "bfloat16"), *[(call, "float32") for call in CALLS]]
)
def test_rewritten_program_has_the_bits_of_each_operation_alone(call: str, dtype: str) -> None:
    x = drawn(4, 33, dtype=dtype)
    with jax.disable_jit():
        expected = np.asarray(multiply_and_add(x), np.float32)
    rewritten = round_operations(CALLS[call])
    np.testing.assert_array_equal(np.asarray(jax.jit(rewritten)(x), np.float32), expected)
    gradient = jax.jit(jax.grad(lambda x: rewritten(x).astype(jnp.float32).sum()))(x)
    limit = 1e-6 if dtype == "float32" else 0.02
    np.testing.assert_allclose(gradient, 2 * x + 0.3, rtol=limit, atol=limit)


def test_exponentials_of_a_rewritten_program_are_polynomials() -> None:
    x = jnp.array([-200, -80, -1.5, 0, 2, 80, 200], jnp.float32)
    rewritten = round_operations(lambda x: (jnp.exp(x), jax.nn.sigmoid(x)))
    names = str(jax.make_jaxpr(rewritten)(x))
    assert "logistic" not in names and " exp " not in names
    for values, expected in zip(rewritten(x), (jnp.exp(x), jax.nn.sigmoid(x)), strict=True):
        np.testing.assert_allclose(values, expected, rtol=3e-7, atol=1e-38)
    slopes = jax.vmap(jax.grad(lambda x: rewritten(x)[1]))(x)
    np.testing.assert_allclose(slopes, jax.vmap(jax.grad(jax.nn.sigmoid))(x), rtol=1e-6, atol=1e-7)


ALIBI = Alibi((0.5, 0.25, 0.02, 0.003), factor=0.7, dtype="bfloat16")


@pytest.mark.parametrize(("window", "alibi"), [(None, None), (70, None), (70, ALIBI)])
def test_attention_over_pages_in_chunks_has_the_bits_of_a_whole_prompt(window, alibi) -> None:
    heads, groups, length, size = 4, 2, 150, 8
    q, k, v = (drawn(1, length, n, 8, seed=n) for n in (heads, groups, 3))
    v = drawn(1, length, groups, 8, seed=9)
    scoring = Scoring(scale=0.3, window=window, alibi=alibi)
    at = jnp.arange(length, dtype=jnp.int32)[None]
    info = MaskInfo(jnp.ones_like(at), jnp.ones_like(at), at, at)
    pages = -(-length // size)
    stored = jnp.pad(jnp.stack([k[0], v[0]], axis=2), ((0, pages * size - length), *[(0, 0)] * 3))
    pool = stored.reshape(pages, size, groups, 2, 8)[None]

    def chunk(first: int, last: int) -> jax.Array:
        ragged = RaggedBatch(
            cu_q_lens=jnp.array([0, last - first], jnp.int32),
            kv_lens=jnp.array([last], jnp.int32),
            seq_of_token=jnp.zeros((last - first,), jnp.int32),
            slots={},
            page_table={"full": jnp.arange(pages, dtype=jnp.int32)[None]},
            state_slots=jnp.zeros((1,), jnp.int32),
            num_seqs=jnp.int32(1),
        )
        call = Paged(
            name="ragged_page_attention_v3",
            q=q[0, first:last],
            scoring=scoring,
            pages=Pages(pool, (jnp.int32(0),), "full"),
            ragged=ragged,
        )
        return native.page_attention(call)

    with fixed_order.chosen_by(ONE):
        call = Projected(name="flash_attn2", q=q, k=k, v=v, mask_info=info, scoring=scoring)
        whole = np.asarray(native.attend_prompt(call))[0]
        for first, last in [(0, 150), (0, 1), (149, 150), (100, 103), (64, 140)]:
            np.testing.assert_array_equal(np.asarray(chunk(first, last)), whole[first:last])


FORMS = ("int8", "int4", "nf4", "fp8", "mxfp8", "mxfp4", "w8a8", "w4a8")


def create_layers(count: int, dtype: str, bias: bool, form: str | None) -> list[Linear]:
    """Create layers [64, 96] of one input."""
    layers = []
    for seed in range(count):
        layer = Linear(
            64,
            96,
            axes=(None, None),
            use_bias=bias,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
            kernel_init=jax.nn.initializers.normal(0.2),
            rngs=nnx.Rngs(seed),
        )
        if bias:
            layer.bias.set_value(drawn(96, seed=seed, dtype=dtype))
        layers.append(layer)
    if form is None:
        return layers
    return quantize(nnx.List(layers), EasyDeLQuantizationConfig(form, pattern=""))


def call_layers(kind: str, layers: list[Linear], x: jax.Array, act: str) -> jax.Array:
    """Return what a block computes of its layers: with the library where it combines products."""
    names = ("mlp_gate", "mlp_up")
    if kind == "gated":
        inner = project_activated(layers, act, x, names)
        return activation(act)(layers[0](x)) * layers[1](x) if inner is None else inner
    if kind == "activated":
        inner = project_activated(layers, act, x, ("mlp_up",))
        return activation(act)(layers[0](x)) if inner is None else inner
    if kind == "single":
        return layers[0](x)
    return jnp.concatenate(project(layers, x), axis=-1)


@pytest.mark.daily(
    "activated-0-None-float32-recomputed",
    "activated-1-None-bfloat16-looped",
    "joined-0-None-float32-recomputed",
    "single-0-None-float32-recomputed",
)
@pytest.mark.parametrize("depth", ["saved", "recomputed", "looped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "bias", "form"),
    [
        *[(kind, bias, None) for kind in ("gated", "activated", "joined") for bias in (0, 1)],
        *[("gated", 0, form) for form in FORMS],
        *[("activated", 1, "int8"), ("joined", 1, "w8a8")],
        *[("single", 0, form) for form in (None, *FORMS)],
    ],
)
def test_gradients_in_one_order_are_those_of_plain_products(kind, bias, form, dtype, depth) -> None:
    layers = create_layers(
        {"gated": 2, "activated": 1, "joined": 3, "single": 1}[kind], dtype, bool(bias), form
    )
    check_gradients(partial(call_layers, kind, act="gelu"), layers, dtype, depth)


def check_gradients(
    call: Callable[[list[Any], jax.Array], jax.Array], layers: list[Any], dtype: str, depth: str
) -> None:
    """Check that layers have the bits of one order with gradients, and ordinary gradients."""
    graphdef, params, codes = nnx.split(nnx.List(layers), nnx.Param, ...)
    x = drawn(2, 5, 64, seed=7, dtype=dtype)

    def run(params, x, config) -> jax.Array:
        with fixed_order.chosen_by(config):
            choice = fixed_order.KernelChoice.get_current()
            return choice.wrap_function(partial(call, nnx.merge(graphdef, params, codes)))(x)

    def loss(params, x, config) -> tuple[jax.Array, jax.Array]:
        block = partial(run, config=config)
        # jax traces the forward pass of inner functions again, after the block of `chosen_by`.
        if depth == "recomputed":
            block = jax.checkpoint(block)
        if depth == "looped":
            y = jax.lax.scan(lambda _, x: (None, block(params, x)), None, x[None])[1][0]
        else:
            y = block(params, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    gradients = {}
    for config in (ONE, PLAIN):
        both = jax.value_and_grad(partial(loss, config=config), argnums=(0, 1), has_aux=True)
        (_, y), gradients[config.batch_invariant] = jax.jit(both)(params, x)
        if config is ONE:  # the bits of a forward pass without gradients
            np.testing.assert_array_equal(y, jax.jit(partial(run, config=ONE))(params, x))
    limit = 2e-5 if dtype == "float32" else 0.04
    for a, b in zip(*(jax.tree.leaves(gradients[order]) for order in (True, False)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b)
        assert np.linalg.norm(b) > 0


@pytest.mark.daily("lora-None-looped")
@pytest.mark.parametrize("depth", ["recomputed", "looped"])
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("adapter", [None, "lora", "dora"])
def test_adapted_and_simulated_layers_have_one_order(adapter, form, depth) -> None:
    """Adapters over plain and quantized matrices; without an adapter, matrices that simulate."""
    if adapter is None and form is not None:
        (layer,) = create_layers(1, "float32", True, None)
        spec = EasyDeLQuantizationConfig(form, pattern="", simulate=True)
        (layer,) = quantize(nnx.List([layer]), spec)
    else:
        (layer,) = create_layers(1, "float32", True, form)
    if adapter is not None:
        layer = LoRALinear(layer, LoraSpec(rank=6, dora=adapter == "dora"), jax.random.key(0))
        layer.lora_b.set_value(drawn(6, 96, seed=3))
    check_gradients(lambda layers, x: layers[0](x), [layer], "float32", depth)
    rows = drawn(7, 64, seed=5)
    with fixed_order.chosen_by(ONE):
        call_ordered(lambda: layer(rows))
        together, alone = (
            np.asarray(jax.jit(round_operations(layer))(x)) for x in (rows, rows[4:5])
        )
    np.testing.assert_array_equal(alone, together[4:5])


@pytest.mark.parametrize("names", [("mlp_gate", "mlp_up"), ("mlp_up",)])
def test_gated_projections_in_one_order_have_names_for_remat_policies(names) -> None:
    layers = create_layers(2, "float32", False, None)

    def loss(x: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def block(x):
            with fixed_order.chosen_by(ONE):
                return call_layers("gated", layers, x, "silu")

        return jnp.sum(jax.checkpoint(block, policy=policy)(x))

    assert {*names} <= names_in(jax.make_jaxpr(jax.grad(loss))(drawn(5, 64)))
