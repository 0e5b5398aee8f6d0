"""Codes in panels: products equal those of plain codes bit by bit, and packed models compute the
same as plain models."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.native import library, products
from ed_layers.packing import pack
from ed_layers.projections.dot import dot
from ed_layers.projections.linear import Linear, project, project_gated
from ed_layers.quantization import encode, quantize
from ed_layers.quantization.panels import CodePanels
from ed_layers.quantization.qarray import codes_of
from flax import nnx
from native_cases import anywhere, built, drawn, exact  # noqa: F401

ROWS = (1, 5, 8, 16, 31, 200)


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
        gated = project_gated(self.gate, self.up, "silu", x, ("gate", "up"))
        y = self.down(a * b if gated is None else a * b + gated)
        return *project((self.gate, self.up), x), y, self.narrow(y)


@built
@pytest.mark.parametrize("quantized", ["w8a8", "w4a8"])
def test_packed_model_computes_the_same_and_keeps_no_plain_matrix(quantized) -> None:
    model, x = quantize(Pair(), [("", {"dtype": quantized})]), drawn(0, 9, 256)
    packed = pack(model)
    held = [isinstance(layer.weight, CodePanels) for layer in (packed.gate, packed.up, packed.down)]
    assert held == [True] * 3 and not isinstance(packed.narrow.weight, CodePanels)
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
    for plain in (coded, half):
        packed = CodePanels.of(plain)
        ours, theirs = (
            jax.grad(lambda x, w=w: jnp.sum(jnp.sin(dot(x, w))))(x) for w in (packed, plain)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


@built
def test_library_refuses_panels_of_numbers_and_mixed_calls() -> None:
    x, codes = jnp.ones((3, 64)), encode(drawn(1, 64, 128), "int8", 64, activations=True)
    with pytest.raises(Exception, match="only matrices of codes can be in panels"):
        jax.block_until_ready(products.products(x, (jnp.ones((2, 64, 64)),)))
    both = (CodePanels.of(codes).matrix, codes_of(codes))
    with pytest.raises(Exception, match="either all matrices of a call are in panels, or none"):
        jax.block_until_ready(products.products_of_codes(x, both, whole=True))


def test_model_without_library_is_not_packed() -> None:
    model = Pair()
    with library.chosen_by(EasyDeLBaseConfig(native_kernels=False)):
        assert pack(model) is model
