"""Mechanisms against a float64 reference, forward and backward; segments never leak."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend

B, S, H, G, K = 2, 77, 4, 2, 8
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [20, 20, 20, 17], axis=1)


def config(name: str, **changes):
    fields = {
        "attn_mechanism": name,
        "decode_attn_mechanism": None,
        "operation_configs": None,
        "blocksize_q": 16,
        "blocksize_k": 32,
        "attn_dtype": None,
        "attn_softmax_dtype": "float32",
        "platform": None,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, K)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def reference(q, k, v, *, segments, causal, window=None, chunk=None, soft_cap=None):
    """Float64 softmax attention, written from the definition, one row at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, s, h in np.ndindex(*q.shape[:3]):
        start = np.flatnonzero(segments[b] == segments[b, s])[0]
        keys = []
        for t in range(k.shape[1]):
            ok = segments[b, s] == segments[b, t] != 0 and (t <= s or not causal)
            if window is not None:
                ok &= abs(s - t) < window
            if chunk is not None:
                ok &= (s - start) // chunk == (t - start) // chunk
            if ok:
                keys.append(t)
        if not keys:
            continue
        g = h // (q.shape[2] // k.shape[2])
        scores = k[b, keys, g] @ q[b, s, h] * q.shape[3] ** -0.5
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[b, s, h] = weights / weights.sum() @ v[b, keys, g]
    return out


CASES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 7},
    "window_of_one": {"window": 1},
    "chunk": {"chunk": 8},
    "soft_cap": {"soft_cap": 2.0},
    "window_and_cap": {"window": 19, "soft_cap": 3.0},
}


def run(name, qkv, segments=SEGMENTS, causal=True, **features):
    info = MaskInfo.from_segments(jnp.asarray(segments), causal=causal)
    mechanism = Mechanism.resolve(config(name), features=frozenset(features))
    return attend(*qkv, info, mechanism=mechanism, **features)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["vanilla", "blockwise"])
def test_equals_the_float64_reference(name, case, qkv):
    features = {"causal": True, **CASES[case]}
    out = run(name, qkv, **features)
    expected = reference(*qkv, segments=SEGMENTS, **features)
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("case", ["causal", "window_and_cap"])
def test_gradients_of_the_lean_form_equal_the_reference_form(case, qkv):
    features = {"causal": True, **CASES[case]}
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(B, S, H, K)), jnp.float32)

    def loss(name):
        return lambda qkv: jnp.sum(run(name, qkv, **features) * weight)

    lean, full = (jax.jit(jax.grad(loss(name)))(qkv) for name in ("blockwise", "vanilla"))
    for a, b in zip(lean, full, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize("name", ["vanilla", "blockwise"])
def test_a_segment_never_sees_another(name, qkv):
    changed = [x.at[0, 20:40].add(3.0) for x in qkv]
    before, after = run(name, qkv), run(name, changed)
    same = np.ones((B, S), bool)
    same[0, 20:40] = False
    np.testing.assert_array_equal(np.asarray(before)[same], np.asarray(after)[same])
    assert np.abs(before - after)[~same].max() > 0


@pytest.mark.parametrize("name", ["vanilla", "blockwise"])
def test_padding_gets_zeros_and_no_nan_gradient(name, qkv):
    out = run(name, qkv)
    assert not np.asarray(out)[0, 60:].any()
    grads = jax.grad(lambda qkv: jnp.sum(run(name, qkv)))(qkv)
    assert all(np.isfinite(g).all() for g in grads)


def test_sinks_take_part_in_the_softmax_only(qkv):
    info = MaskInfo.full(B, S)
    mechanism = Mechanism.resolve(config("vanilla"))
    plain, _ = attend(*qkv, info, mechanism=mechanism)
    low, _ = attend(*qkv, info, mechanism=mechanism, sinks=jnp.full((H,), -1e9))
    high, _ = attend(*qkv, info, mechanism=mechanism, sinks=jnp.full((H,), 50.0))
    np.testing.assert_allclose(low, plain, atol=1e-6)
    assert np.abs(high).max() < 1e-6


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        ("vanila", set(), "did you mean 'vanilla'"),
    ],
)
def test_a_mechanism_that_cannot_is_refused_when_built(name, features, message):
    with pytest.raises(ConfigError, match=message):
        Mechanism.resolve(config(name), features=frozenset(features))
