"""Recurrences of the native library: values, states, and tokens that do not depend on others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers import fixed_order
from ed_layers.native import recurrences
from ed_layers.native.recurrences import Terms
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import anywhere, built, drawn, exact  # noqa: F401

pytestmark = built
FORMS = ("one decay, keys last", "rates", "one decay", "decay of each key", "delta rule")


def terms_of(form: str, r: int, c: int, g: int, shared: int, k: int, v: int) -> Terms:
    """Return random inputs; `shared` heads have the queries and keys of a group."""
    h, keys_last = g * shared, form in FORMS[:2]
    query, key = drawn(1, r, c, g, k), drawn(2, r, c, g, k) / np.sqrt(k)
    decays = {"rates": v, "decay of each key": k}.get(form, 1)
    decay = jax.nn.sigmoid(drawn(3, r, c, h, decays) + 2)
    return Terms(
        query,
        key,
        drawn(4, r, c, h, v),
        decay,
        rates=-jnp.exp(drawn(5, h, v, k)) if form == "rates" else None,
        beta=jax.nn.sigmoid(drawn(6, r, c, h)) if form == "delta rule" else None,
        keys_last=keys_last,
    )


def expected(
    terms: Terms, states: np.ndarray, marks: np.ndarray, owner: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the recurrence token by token in float64; states are [m, h, k, v]."""
    of = {
        name: exact(x)
        for name in ("query", "key", "value", "decay", "rates", "beta")
        if (x := getattr(terms, name)) is not None
    }
    states, out = states.copy(), np.zeros(terms.value.shape)
    shared = terms.value.shape[2] // terms.key.shape[2]
    for row, column, head in np.ndindex(*terms.value.shape[:3]):
        mark, state = marks[row, column], states[owner[row], head]
        if mark == 0:
            continue
        at, group = (row, column, head), (row, column, head // shared)
        decay = of["decay"][at]
        decay = np.exp(decay * of["rates"][head].T) if "rates" in of else decay[:, None]
        state = decay * state * (mark == 1)
        write, key = of["value"][at], of["key"][group]
        if "beta" in of:
            write = of["beta"][at] * (write - key @ state)
        states[owner[row], head] = state = state + np.outer(key, write)
        out[at] = of["query"][group] @ state
    return out, states


@pytest.mark.nightly
@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    c=st.integers(1, 6),
    g=st.integers(1, 2),
    shared=st.integers(1, 3),
    k=st.sampled_from([1, 3, 16, 37, 64]),
    v=st.sampled_from([1, 5, 16, 40, 130]),
    chained=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_states_are_those_of_float64(form, c, g, shared, k, v, chained, seed) -> None:
    r, rng = 3, np.random.default_rng(seed)
    terms, marks = terms_of(form, r, c, g, shared, k, v), rng.choice(3, (r, c), p=[0.2, 0.6, 0.2])
    owner = [0, 0, 2] if chained else [0, 1, 2]
    states = exact(drawn(seed, 3, g * shared, k, v))
    stored = states.swapaxes(2, 3) if terms.keys_last else states
    out, after = jax.jit(recurrences.recur)(
        terms,
        jnp.asarray(stored, jnp.float32),
        jnp.asarray(marks, jnp.int32),
        jnp.asarray(owner, jnp.int32) if chained else None,
    )
    wanted, wanted_after = expected(terms, states, marks, owner)
    after = after.swapaxes(2, 3) if terms.keys_last else after
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(after, wanted_after, rtol=1e-5, atol=1e-5 * np.abs(states).max())


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_bits_alone_and_in_a_row(form) -> None:
    terms, states = terms_of(form, 2, 7, 2, 2, 37, 21), drawn(0, 2, 4, 37, 21)
    marks = jnp.ones((2, 7), jnp.int32)
    out, after = recurrences.recur(terms, states, marks, None)
    state = states[1:]
    for token in range(7):
        one = replace(
            terms,
            **{
                name: None if x is None else x[1:, token : token + 1]
                for name in ("query", "key", "value", "decay", "beta")
                if (x := getattr(terms, name)) is not None
            },
        )
        alone, state = recurrences.recur(one, state, marks[1:, :1], None)
        np.testing.assert_array_equal(alone[0, 0], out[1, token])
    np.testing.assert_array_equal(state[0], after[1])


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_a_mesh_have_the_bits_of_one_device(form) -> None:
    terms, states = terms_of(form, 4, 3, 2, 2, 16, 8), drawn(0, 4, 4, 16, 8)
    marks = jnp.ones((4, 3), jnp.int32)
    whole = recurrences.recur(terms, states, marks, None)
    config = EasyDeLBaseConfig(batch_invariant=True, sharding_axis_dims=(2, 1, 1, 2, 1))
    with fixed_order.chosen_by(config):
        parts = jax.jit(lambda *arrays: recurrences.recur(*arrays, None))(terms, states, marks)
    for part, one in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(part, one)
