"""Matrices in panels: products equal those of plain matrices bit by bit, and packed models compute
the same as plain models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers import fixed_order, packing
from ed_layers.native import products
from ed_layers.packing import pack
from ed_layers.projections.dot import Transposed, dot
from ed_layers.projections.embed import Embed
from ed_layers.projections.linear import Linear, project, project_activated
from ed_layers.projections.panels import Panels
from ed_layers.quantization import encode, quantize
from ed_layers.quantization.panels import CodePanels, TablePanels
from ed_layers.quantization.qarray import QArray
from flax import nnx
from native_cases import anywhere, built, drawn, exact  # noqa: F401

ROWS = (1, 5, 8, 16, 31, 200)
ROWS_OF_NUMBERS = (1, 2, 3, 4, 7, 20, 64, 130, 300)


@built
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("group", "groups"), [(600, 1), (304, 2), (64, 9), (32, 9), (24, 16)])
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.daily("int8-64-9-False")
def test_products_of_code_panels_are_exact_and_equal_those_of_plain_codes(
    form, group, groups, offset
) -> None:
    w = encode(drawn(1, group * groups, 192), form, group, activations=True)
    if offset:
        w = replace(w, zero=jnp.round(3 * drawn(2, groups, 192)))
    assert CodePanels.can_be(w)
    panels = CodePanels.of(w)
    np.testing.assert_array_equal(panels.dense(), w.dense())
    for rows in ROWS:
        x = drawn(rows, rows, group * groups)
        np.testing.assert_array_equal(panels.product(x), w.product(x))


@pytest.mark.daily(
    "float32-bfloat16-130-320",
    "bfloat16-float32-576-192",
    "bfloat16-bfloat16-4100-64",
)
@built
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (130, 320), (4100, 64)])
@pytest.mark.parametrize("of_x", ["float32", "bfloat16"])
@pytest.mark.parametrize("of_w", ["float32", "bfloat16"])
def test_products_of_panels_have_the_bits_of_those_of_plain_matrices(
    of_w, of_x, inputs, outputs
) -> None:
    w = drawn(1, inputs, outputs, dtype=of_w)
    assert Panels.can_be(w)
    panels = Panels.of(w)
    assert panels.shape == w.shape
    np.testing.assert_array_equal(panels.unpack_panels(), w)
    for rows in ROWS_OF_NUMBERS:
        x = drawn(rows, rows, inputs, dtype=of_x)
        # Tiles of AMX add the products of a sum in one order for panels and for plain matrices.
        np.testing.assert_array_equal(panels.product(x), products.product(x, w))


class Pair(nnx.Module):
    """Two projections of one input, and one back."""

    def __init__(self, dtype: str = "float32", precision: str | None = None) -> None:
        rngs, init = nnx.Rngs(0), nnx.initializers.normal(0.1)
        kinds = {"dtype": dtype, "param_dtype": dtype, "precision": precision}
        made = [
            Linear(*sizes, axes=(None, None), use_bias=bias, kernel_init=init, rngs=rngs, **kinds)
            for sizes, bias in [((256, 192), 0), ((256, 192), 0), ((192, 256), 1), ((256, 100), 1)]
        ]
        self.gate, self.up, self.down, self.narrow = made

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        a, b = project((self.gate, self.up), x)
        gated = project_activated((self.gate, self.up), "silu", x, ("gate", "up"))
        y = self.down(a * b if gated is None else a * b + gated)
        return *project((self.gate, self.up), x), y, self.narrow(y)


def require_same_results(packed: Any, model: Any, x: jax.Array, *, tolerance: float) -> None:
    """Require equal bits. Without the library, both compute by XLA, within a tolerance."""
    for one, other in zip(jax.jit(packed)(x), jax.jit(model)(x), strict=True):
        np.testing.assert_array_equal(one, other)
    with fixed_order.chosen_by(EasyDeLBaseConfig(native_kernels=False)):
        for one, other in zip(jax.jit(packed)(x), jax.jit(model)(x), strict=True):
            np.testing.assert_allclose(exact(one), exact(other), rtol=tolerance, atol=tolerance)


@pytest.mark.daily("w4a8")
@built
@pytest.mark.parametrize("quantized", ["w8a8", "w4a8"])
def test_packed_model_computes_the_same_and_keeps_no_plain_matrix(quantized) -> None:
    model, x = quantize(Pair(), [("", {"dtype": quantized})]), drawn(0, 9, 256)
    packed = pack(model)
    held = [isinstance(layer.weight, CodePanels) for layer in (packed.gate, packed.up, packed.down)]
    assert held == [True] * 3 and not isinstance(packed.narrow.weight, CodePanels)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(m))) for m in (model, packed)]
    assert sizes[0] == sizes[1]
    require_same_results(packed, model, x, tolerance=1e-4)


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_numbers_compute_the_same_bits_and_need_no_more_memory(dtype) -> None:
    model, x = Pair(dtype), drawn(0, 9, 256, dtype=dtype)
    packed = pack(model)
    held = [isinstance(layer.weight, Panels) for layer in (packed.gate, packed.up, packed.down)]
    assert held == [True] * 3 and isinstance(packed.narrow.weight, jax.Array)
    assert type(packed.gate.kernel) is nnx.Param
    assert packed.gate.kernel.get_metadata()["axes"] == (None, None)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(m))) for m in (model, packed)]
    assert sizes[0] == sizes[1]
    # One rounding of bfloat16.
    require_same_results(packed, model, x, tolerance=1e-4 if dtype == "float32" else 2**-8)


@built
def test_numbers_stay_plain_on_request_and_with_other_products() -> None:
    assert pack(Pair(precision="high")).gate.kernel.get_value().ndim == 2
    model = Pair()
    model.gate.dtype = jnp.bfloat16  # products convert the matrix
    packed = pack(model)
    assert isinstance(packed.gate.weight, jax.Array) and isinstance(packed.up.weight, Panels)
    assert pack(model, numbers=False) is model
    packed = pack(quantize(model, [("gate", {"dtype": "w8a8"})]), numbers=False)
    assert isinstance(packed.gate.weight, CodePanels) and isinstance(packed.up.weight, jax.Array)


class Tied(nnx.Module):
    """An embedding that is also the head."""

    def __init__(self, features: int = 256) -> None:
        self.embed = Embed(
            320,
            features,
            config=EasyDeLBaseConfig(),
            embedding_init=nnx.initializers.normal(0.1),
            rngs=nnx.Rngs(0),
        )

    def __call__(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.embed(ids)
        table = self.embed.table
        return x, dot(x, Transposed(table) if isinstance(table, jax.Array) else table.T)


@pytest.mark.daily("w8a8")
@built
@pytest.mark.parametrize("quantized", ["w8a8", "w4a8"])
def test_packed_embedding_returns_the_rows_and_is_the_tied_head(quantized) -> None:
    model = quantize(Tied(), [("", {"dtype": quantized})])
    packed = pack(model)
    assert isinstance(packed.embed.table, TablePanels) and packed.embed.table.shape == (320, 256)
    assert packed.embed.embedding.get_metadata()["axes"] == ("vocab", "embed")
    for shape in [(1, 1), (3, 40)]:
        ids = jax.random.randint(jax.random.key(0), shape, 0, 320)
        require_same_results(packed, model, ids, tolerance=1e-4)
    missing = packed.embed.table.take(jnp.array([319, 320, -1, -320, -321]))
    np.testing.assert_array_equal(jnp.isnan(missing).all(-1), [False, True, False, False, True])
    np.testing.assert_array_equal(missing[0], missing[2])
    assert isinstance(pack(quantize(Tied(), [("", {"dtype": "int8"})])).embed.table, QArray)
    assert isinstance(pack(Tied()).embed.table, jax.Array)


def test_memory_for_packed_numbers_is_half_of_the_available_memory(monkeypatch) -> None:
    model = Pair()
    matrices = sum(layer.kernel.get_value().nbytes for layer in (model.gate, model.up, model.down))
    for available, there in [(2 * matrices, True), (2 * matrices - 1, False)]:
        monkeypatch.setattr(packing, "available_bytes", lambda available=available: available)
        assert packing.memory_for_numbers(model) == there


@pytest.mark.nightly
@built
def test_activations_of_panels_have_the_gradient_of_plain_matrices() -> None:
    x, w = drawn(0, 7, 256), drawn(1, 256, 128)
    coded, half = (encode(w, form, 64, activations=True) for form in ("int8", "int4"))
    pairs = [(w, Panels.of(w)), *((plain, CodePanels.of(plain)) for plain in (coded, half))]
    for plain, packed in pairs:
        ours, theirs = (
            jax.grad(lambda x, w=w: jnp.sum(jnp.sin(dot(x, w))))(x) for w in (packed, plain)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


@built
def test_library_refuses_panels_of_other_shapes_and_formats_and_mixed_calls() -> None:
    x, codes = jnp.ones((3, 64)), encode(drawn(1, 64, 128), "int8", 64, activations=True)
    for shape, dtype in [
        ((2, 64, 32), jnp.float32),
        ((2, 32, 64), jnp.float32),
        ((2, 64, 64), jnp.bfloat16),
        ((2, 32, 64, 4), jnp.bfloat16),
    ]:
        with pytest.raises(Exception, match="the matrix in panels has shape"):
            jax.block_until_ready(products.products(x, (jnp.ones(shape, dtype),)))
    with pytest.raises(Exception, match="panels of pairs require an even number of inputs"):
        jax.block_until_ready(
            products.products(x[:, :63], (jnp.ones((2, 31, 64, 2), jnp.bfloat16),))
        )
    both = (jnp.ones((2, 64, 64)), jnp.ones((64, 128)))
    with pytest.raises(Exception, match="either all matrices of a call are in panels, or none"):
        jax.block_until_ready(products.products(x, both))
    packed = CodePanels.of(codes)
    for form, message in [
        (packed.form._replace(bits=4), "the panels of codes has shape"),
        (packed.form._replace(scale_bytes=2), "the panels of codes has shape"),
        (packed.form._replace(zero_bytes=1), "the panels of codes has shape"),
        (packed.form._replace(bits=5), "a code must have 4 or 8 bits"),
        (packed.form._replace(zero_bytes=2), "a zero must have 0, 1 or 4 bytes"),
    ]:
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(products.products_of_code_panels(x, (packed.groups,), form))


def test_model_without_library_is_not_packed() -> None:
    model = Pair()
    with fixed_order.chosen_by(EasyDeLBaseConfig(native_kernels=False)):
        assert pack(model) is model
