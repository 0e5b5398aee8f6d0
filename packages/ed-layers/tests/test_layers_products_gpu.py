"""The Triton kernel for products with codes equals float64 products of the decoded matrix.

Without a GPU, the kernel is interpreted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.fixed_order import KernelChoice, chosen_by
from ed_layers.quantization import encode, products_gpu
from ed_layers.quantization.qarray import QArray, Turned

INTERPRET = jax.default_backend() != "gpu"
ON_GPU = KernelChoice(on_one_gpu=True)
#: Format and group size.
FORMATS = [
    ("int8", None),
    ("int8", 64),
    ("fp8", None),
    ("fp8", 128),
    ("int4", None),
    ("nf4", None),
    ("nf4", 128),
    ("mxfp8", None),
    ("mxfp4", None),
]


def build_matrix(
    name: str, group_size: int | None, inputs: int = 384, outputs: int = 200, **options: Any
) -> QArray:
    """Quantize a random matrix whose columns have different sizes."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(inputs, outputs)) * np.exp(draw.normal(size=outputs))
    return encode(jnp.asarray(x, jnp.float32), name, group_size, **options)


def check(w: QArray, rows: int, dtype: Any, *, turned: bool = False) -> None:
    """Fail unless the kernel equals the product in float64."""
    table = w.transpose() if turned else w
    assert isinstance(table, QArray)
    draw = np.random.default_rng(2)
    x = jnp.asarray(draw.normal(size=(rows, w.shape[-2])), dtype)
    with jax.default_matmul_precision("highest"):
        result = products_gpu.multiply_codes(x, table, interpret=INTERPRET)
    expected = np.asarray(x, np.float64) @ np.asarray(w.dense(jnp.float32), np.float64)
    assert result.dtype == dtype
    error = np.abs(np.asarray(result, np.float64) - expected).max() / np.abs(expected).max()
    assert error <= (1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.daily("int8-None-float32", "mxfp4-None-float32", "int4-None-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "group_size"), FORMATS)
def test_product_of_codes_equals_float64(name: str, group_size: int | None, dtype: Any) -> None:
    check(build_matrix(name, group_size), 5, dtype)


@pytest.mark.daily("fp8-None")
@pytest.mark.parametrize(("name", "group_size"), FORMATS)
def test_product_of_a_transposed_table_equals_float64(name: str, group_size: int | None) -> None:
    check(build_matrix(name, group_size), 5, jnp.float32, turned=True)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 16, 33, 128, 200])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_product_of_codes_computes_any_number_of_rows(name: str, rows: int) -> None:
    check(build_matrix(name, None), rows, jnp.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("double", [False, True], ids=["scales", "quantized scales"])
@pytest.mark.parametrize("inputs", [2880, 1024])
def test_product_of_codes_merges_splits_of_the_depth(inputs: int, double: bool) -> None:
    w = build_matrix("nf4" if double else "int8", None, inputs, 256, double=double)
    assert products_gpu.CodeBlocks.of(8, w, None).splits > 1
    check(w, 8, jnp.float32)


def test_kernel_is_used_on_one_gpu_and_for_few_rows() -> None:
    w = build_matrix("int8", None, 512, 256)
    assert products_gpu.supports(ON_GPU, 128, jnp.bfloat16, w)
    assert not products_gpu.supports(ON_GPU, 512, jnp.bfloat16, w)
    assert not products_gpu.supports(KernelChoice(), 128, jnp.bfloat16, w)
    assert not products_gpu.supports(KernelChoice(False, None, True), 128, jnp.bfloat16, w)
    with chosen_by(EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 1, 1))):
        assert KernelChoice.get_current().on_one_gpu == (jax.default_backend() == "gpu")


@pytest.mark.parametrize("turned", [False, True])
def test_matrix_of_codes_calls_the_kernel_and_keeps_its_gradient(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = build_matrix("int8", None, 512, 256)
    matrix = Turned(w.transpose()) if turned else w
    calls: list[Any] = []

    def multiply_codes(x: jax.Array, stored: Any, **options: Any) -> jax.Array:
        calls.append(stored)
        return jnp.matmul(x, w.dense(x.dtype))

    monkeypatch.setattr(products_gpu, "multiply_codes", multiply_codes)
    x = jnp.ones((4, 512))
    with ON_GPU.restore():
        y, pull = jax.vjp(matrix.product, x)
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0], x * 0 + w.dense().sum(1), rtol=1e-4)
    assert len(calls) == 1
