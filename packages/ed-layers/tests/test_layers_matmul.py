"""Products of bfloat16 are summed in float32 and rounded once, in any shape; gradients, too.

Lookups of rows convert no table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.projections.dot import Transposed, dot
from ed_layers.projections.matmul import batch_matmul, gather_rows, matmul
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.sampled_from([1, 2, 7, 19])
#: Half of the distance between neighbouring bfloat16 numbers, relative; and float32's sums.
ROUNDED = 2**-8 + 1e-6


def drawn(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def near(found: jax.Array, expected: np.ndarray, sizes: np.ndarray) -> None:
    """Within rounding of the result, and float32 sums of terms of the size `sizes`."""
    assert (np.abs(exact(found) - expected) <= ROUNDED * np.abs(expected) + 1e-6 * sizes).all()


@settings(max_examples=6, deadline=None)
@given(rows=SIZES, i=SIZES, o=SIZES, transposed=st.booleans(), seed=st.integers(0, 99))
def test_a_product_and_its_gradients_are_rounded_once(rows, i, o, transposed, seed) -> None:
    x, w, d_y = drawn(seed, rows, i), drawn(seed + 1, i, o), drawn(seed + 2, rows, o)

    def product(x, w):
        return matmul(x, w.T if transposed else w, transposed=transposed)

    y, pull = jax.vjp(product, x, w)
    d_x, d_w = pull(d_y)
    assert {a.dtype for a in (y, d_x, d_w)} == {jnp.dtype("bfloat16")}
    x, w, d_y = (exact(a) for a in (x, w, d_y))
    near(y, x @ w, np.abs(x) @ np.abs(w))
    near(d_x, d_y @ w.T, np.abs(d_y) @ np.abs(w.T))
    near(d_w, x.T @ d_y, np.abs(x.T) @ np.abs(d_y))


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_matmul_supports_leading_axes_and_transposed_weights(rows, dtype) -> None:
    x, w = drawn(0, *rows, 8, dtype=dtype), drawn(1, 8, 5)
    for weight in (w, Transposed(w.T)):
        y = jax.jit(dot)(x, weight)
        assert (y.shape, y.dtype, weight.shape) == ((*rows, 5), x.dtype, (8, 5))
        near(y, exact(x) @ exact(w.astype(dtype)), np.full(y.shape, 10.0))


def test_vmapped_matmul_matches_exact_product() -> None:
    x, w = drawn(0, 4, 3, 8), drawn(1, 4, 8, 5)
    y, pull = jax.vjp(jax.vmap(matmul), x, w)
    near(y, exact(x) @ exact(w), np.full(y.shape, 10.0))
    assert [g.shape for g in pull(y)] == [x.shape, w.shape]


@settings(max_examples=6, deadline=None)
@given(m=SIZES, k=SIZES, n=SIZES, transposed=st.booleans())
def test_stacks_of_matrices_give_float32(m, k, n, transposed) -> None:
    a, b = drawn(0, 2, 3, m, k), drawn(1, 2, 3, k, n)
    laid = b.swapaxes(2, 3) if transposed else b
    y = batch_matmul(a, laid, transposed=transposed, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact(a) @ exact(b), atol=1e-4)


@pytest.mark.nightly
def test_another_platform_has_the_plain_product() -> None:
    """A program for a TPU that is compiled on this host has one product, of bfloat16."""
    x, w = drawn(0, 4, 8), drawn(1, 8, 5)
    text = jax.jit(matmul).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("dot_general") == 1
    assert "tensor<4x5xf32>" not in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPUs convert tables")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_loop_of_lookups_makes_no_copy_of_a_table(dtype: str) -> None:
    def decode(table: jax.Array, token: jax.Array) -> jax.Array:
        def step(_: int, token: jax.Array) -> jax.Array:
            return jnp.argmax(gather_rows(table, token, axis=0).astype(jnp.float32), axis=-1)

        return jax.lax.fori_loop(0, 4, step, token)

    table = jax.random.normal(jax.random.key(0), (4096, 64)).astype(dtype)
    program = jax.jit(decode).lower(table, jnp.zeros((2,), jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < table.nbytes / 8
    expected = np.zeros(2, np.int64)
    for _ in range(4):
        expected = np.asarray(table, np.float32)[expected].argmax(-1)
    np.testing.assert_array_equal(program(table, jnp.zeros((2,), jnp.int32)), expected)


def test_gradients_of_lookups_in_16_bits() -> None:
    table, ids = jnp.ones((5, 3), jnp.bfloat16), jnp.array([[1, 1], [4, 0]])
    gradient = jax.grad(lambda table: jnp.sum(gather_rows(table, ids, axis=0).astype(jnp.float32)))(
        table
    )
    expected = np.zeros((5, 3), np.float32)
    np.add.at(expected, np.asarray(ids), 1)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), expected)
