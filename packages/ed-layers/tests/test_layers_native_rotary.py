"""Rotary positions of the native library: values, gradients, and the conditions of use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.rope.rotation import rotate
from ed_layers.rotary import apply_rotary, rope_tables
from ed_layers.rotary import rotate_native as native_rotate
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import DTYPES, anywhere, built, drawn, exact  # noqa: F401

pytestmark = built


def tables(b: int, s: int, pairs: int) -> tuple[jax.Array, jax.Array]:
    positions = jnp.arange(b * s, dtype=jnp.int32).reshape(b, s)
    return rope_tables(positions, 0.3 ** jnp.arange(pairs, dtype=jnp.float32), 1.5)


@settings(max_examples=25, deadline=None)
@given(
    b=st.integers(1, 3),
    s=st.sampled_from([1, 2, 7, 90]),
    h=st.integers(1, 5),
    pairs=st.integers(1, 40),
    rest=st.sampled_from([0, 1, 16]),
    interleaved=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
@pytest.mark.nightly
def test_native_rotations_are_exact(b, s, h, pairs, rest, interleaved, dtype, seed) -> None:
    x, (cos, sin) = drawn(seed, b, s, h, 2 * pairs + rest, dtype=dtype), tables(b, s, pairs)
    y = native_rotate(interleaved, x, cos, sin)
    turn, by = exact(x)[..., : 2 * pairs], [exact(t)[:, :, None] for t in (cos, sin)]
    pair = turn.reshape(b, s, h, -1, 2) if interleaved else turn.reshape(b, s, h, 2, -1)
    axis = -1 if interleaved else -2
    one, other = np.moveaxis(pair, axis, 0)
    expected = np.stack([one * by[0] - other * by[1], other * by[0] + one * by[1]], axis)
    expected = np.concatenate([expected.reshape(turn.shape), exact(x)[..., 2 * pairs :]], -1)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    bound = 2**-8 if dtype == "bfloat16" else 2e-7
    assert (np.abs(exact(y) - expected) <= bound * 4 * np.abs(exact(x)).max()).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.nightly
def test_gradients_are_those_of_plain_xla(interleaved) -> None:
    x, weights, (cos, sin) = drawn(0, 2, 5, 3, 12), drawn(1, 2, 5, 3, 12), tables(2, 5, 4)

    def loss(x, turn):
        return (weights * turn(x) ** 2).sum()

    got = jax.grad(loss)(x, lambda x: native_rotate(interleaved, x, cos, sin))
    plain = (cos[:, :, None], sin[:, :, None])
    want = jax.grad(loss)(x, lambda x: rotate(x, *plain, interleaved))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_rotary_layers_use_native_kernel_with_shared_tables(monkeypatch) -> None:
    x, rope = drawn(0, 3, 4, 2, 8), tables(1, 4, 4)
    assert "ed_layers_rotary" in str(jax.make_jaxpr(apply_rotary)(x, rope))
    taken = apply_rotary(x, rope)
    monkeypatch.setenv("ED_LAYERS_NATIVE", "0")
    assert "ed_layers_rotary" not in str(jax.make_jaxpr(lambda x: apply_rotary(x, rope))(x))
    np.testing.assert_allclose(taken, apply_rotary(x, rope), atol=1e-6)


@pytest.mark.nightly
def test_a_token_does_not_depend_on_its_company() -> None:
    x, (cos, sin) = drawn(0, 1, 600, 4, 48), tables(1, 600, 20)
    whole = native_rotate(False, x, cos, sin)
    for start, stop in ((0, 1), (7, 9), (100, 500)):
        part = native_rotate(False, x[:, start:stop], cos[:, start:stop], sin[:, start:stop])
        np.testing.assert_array_equal(part, whole[:, start:stop])
