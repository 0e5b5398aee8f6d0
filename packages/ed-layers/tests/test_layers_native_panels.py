"""Matrices in panels: products equal those of plain matrices bit by bit, and packed models compute
the same as plain models."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.fused_projections import project, project_gated
from ed_layers.native import library, products
from ed_layers.packing import pack
from ed_layers.projections.linear import Linear, dot
from ed_layers.projections.panels import Panels
from ed_layers.quantization import encode, quantize
from ed_layers.quantization.panels import CodePanels
from flax import nnx
from native_cases import anywhere, built, drawn, exact  # noqa: F401

ROWS = (1, 5, 8, 16, 31, 200)


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_panels_are_exact_and_equal_those_of_plain_matrices(dtype) -> None:
    w = drawn(1, 300, 192)
    for rows in ROWS:
        x = drawn(rows, rows, 300, dtype=dtype)
        y = Panels.of(w).product(x)
        assert (y.shape, y.dtype) == ((rows, 192), x.dtype)
        np.testing.assert_array_equal(exact(y), exact(products.product(x, w)))
    expected, sizes = exact(x) @ exact(w), np.abs(exact(x)) @ np.abs(exact(w))
    rounded = 2**-8 * np.abs(expected) if dtype == "bfloat16" else 0
    assert (np.abs(exact(y) - expected) <= rounded + 2e-6 * sizes).all()


@built
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("group", "groups"), [(600, 1), (304, 2), (64, 9), (32, 9), (24, 16)])
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.daily("int8-304-2-True", "int8-64-9-False", "int4-304-2-True", "int4-32-9-False")
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


class Pair(nnx.Module):
    """Two projections of one input, and one back."""

    def __init__(self) -> None:
        rngs, init = nnx.Rngs(0), nnx.initializers.normal(0.1)
        made = [
            Linear(*sizes, axes=(None, None), use_bias=bias, kernel_init=init, rngs=rngs)
            for sizes, bias in [((256, 192), 0), ((256, 192), 0), ((192, 256), 1), ((256, 100), 1)]
        ]
        self.gate, self.up, self.down, self.narrow = made

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        a, b = project((self.gate, self.up), x)
        gated = project_gated(self.gate, self.up, "silu", x)
        y = self.down(a * b if gated is None else a * b + gated)
        return *project((self.gate, self.up), x), y, self.narrow(y)


@built
@pytest.mark.parametrize("quantized", [None, "w8a8", "w4a8"])
def test_packed_model_computes_the_same_and_keeps_no_plain_matrix(quantized) -> None:
    model, x = Pair(), drawn(0, 9, 256)
    if quantized:
        model = quantize(model, [("", {"dtype": quantized})])
    packed = pack(model)
    kind = CodePanels if quantized else Panels
    held = [isinstance(layer.weight, kind) for layer in (packed.gate, packed.up, packed.down)]
    assert held == [True] * 3 and not isinstance(packed.narrow.weight, kind)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(m))) for m in (model, packed)]
    assert sizes[0] == sizes[1]
    for one, other in zip(jax.jit(packed)(x), jax.jit(model)(x), strict=True):
        np.testing.assert_array_equal(one, other)
    # Without the library, both compute by XLA.
    with library.chosen_by(EasyDeLBaseConfig(native_kernels=False)):
        for one, other in zip(jax.jit(packed)(x), jax.jit(model)(x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@built
def test_activations_of_panels_have_the_gradient_of_plain_matrices() -> None:
    x, w = drawn(0, 7, 256), drawn(1, 256, 128)
    coded, half = (encode(w, form, 64, activations=True) for form in ("int8", "int4"))
    for plain, packed in (
        (w, Panels.of(w)),
        (coded, CodePanels.of(coded)),
        (half, CodePanels.of(half)),
    ):
        ours, theirs = (
            jax.grad(lambda x, w=w: jnp.sum(jnp.sin(dot(x, w))))(x) for w in (packed, plain)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


@built
def test_library_refuses_panels_of_other_layouts() -> None:
    x, result = jnp.ones((3, 64)), [jax.ShapeDtypeStruct((3, 128), jnp.float32)]
    call = jax.ffi.ffi_call(library.TARGETS["ed_product"], result)
    for shape in ((2, 60, 64), (2, 64, 32), (2, 64, 64, 1)):
        with pytest.raises(Exception, match="the matrix has shape"):
            jax.block_until_ready(call(x, jnp.ones(shape), transposed=False, act=np.int64(0)))
    both = (jnp.ones((2, 64, 64)), jnp.ones((64, 128)))
    with pytest.raises(Exception, match="either all matrices of a call are in panels, or none"):
        jax.block_until_ready(products.products(x, both))


def test_model_without_library_is_not_packed() -> None:
    model = Pair()
    with library.chosen_by(EasyDeLBaseConfig(native_kernels=False)):
        assert pack(model) is model
