"""Lookups of token ids in a table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.lookup import rows_of

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a copy that CPUs make")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_loop_of_lookups_makes_no_copy_of_a_table(dtype: str) -> None:
    def decode(table: jax.Array, token: jax.Array) -> jax.Array:
        def step(_: int, token: jax.Array) -> jax.Array:
            return jnp.argmax(rows_of(table, token, axis=0).astype(jnp.float32), axis=-1)

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
    gradient = jax.grad(lambda table: jnp.sum(rows_of(table, ids, axis=0).astype(jnp.float32)))(
        table
    )
    expected = np.zeros((5, 3), np.float32)
    np.add.at(expected, np.asarray(ids), 1)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), expected)
