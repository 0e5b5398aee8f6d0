"""Each recurrence: in chunks as token by token, packed, padded, in steps and served.

Legend: n tokens, h heads, k numbers of a key, v numbers of a value, f channels.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.cache.spec import RecurrentSpec
from ed_layers.parts import Parts
from ed_layers.recurrence.conv import GatedShortConv
from ed_layers.recurrence.delta import GatedDelta, KimiDelta, delta_rule
from ed_layers.recurrence.lightning import LightningAttention, linear_attention
from ed_layers.recurrence.rg_lru import RGLRU, diagonal, root
from ed_layers.recurrence.rows import Rows
from ed_layers.recurrence.rwkv import ChannelMixing, TimeMixing, time_mixing
from flax import nnx
from recurrence_cases import (
    check_bits,
    check_gradients,
    ctx_of,
    in_steps,
    runs,
    served,
    with_library,
)

D, H, K, V, F = 12, 4, 6, 5, 7
CONFIG = SimpleNamespace(
    hidden_size=D,
    num_attention_heads=H,
    num_hidden_layers=3,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    initializer_range=0.4,
)


class Rwkv(nnx.Module):
    """Both mixings of RWKV, one after the other, as one layer."""

    def __init__(self, parts: Parts):
        self.first, self.second = TimeMixing(parts, 8), ChannelMixing(parts, 10)
        self.cache_spec = RecurrentSpec((*self.first.states, *self.second.states))
        self.chunk = 64

    def __call__(self, x: Any, ctx: Any, cache: Any, layer: Any) -> Any:
        rows = Rows.of(ctx, x.shape[:2], cache, chunk=self.chunk)
        states = rows.states(cache, layer, self.cache_spec)
        x, first = self.first(x, states, rows)
        x, second = self.second(x, states, rows)
        return x, rows.store(cache, layer, {**first, **second}, self.cache_spec)


MIXERS: dict[str, Any] = {
    "delta": lambda parts: GatedDelta(
        parts, key_heads=2, value_heads=H, key_dim=K, value_dim=V, taps=4, beta_scale=2.0
    ),
    "kimi": lambda parts: KimiDelta(
        parts, key_heads=H, value_heads=H, key_dim=K, value_dim=V, taps=3
    ),
    "lightning": LightningAttention,
    "rg_lru": lambda parts: RGLRU(parts, 8, 2, taps=4, hidden_act="gelu"),
    "short_conv": lambda parts: GatedShortConv(parts, 3, bias=True),
    "rwkv": Rwkv,
}


def made(name: str) -> Any:
    """The mixer of that name, with biases that are not zero."""
    mixer = MIXERS[name](Parts(CONFIG, nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(mixer)):
        value = variable.get_value()
        variable.set_value(value + 0.3 * rng.normal(size=value.shape).astype(np.float32))
    nnx.update(mixer, nnx.state(mixer))
    return mixer


def near(got: Any, expected: Any, bound: float = 5e-6) -> None:
    np.testing.assert_allclose(got, expected, rtol=bound, atol=bound)


def loop_delta(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
    state, out = np.zeros((H, K, V)), []
    for t in range(len(q)):
        state = np.exp(g[t])[..., None] * state
        recalled = np.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][..., None] * (beta[t][:, None] * (v[t] - recalled))[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.asarray(out)


def loop_linear(q: Any, k: Any, v: Any, g: Any) -> np.ndarray:
    state, out = np.zeros((H, K, V)), []
    for t in range(len(q)):
        state = np.exp(g[t])[..., None] * state + k[t][..., None] * v[t][:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.asarray(out)


def loop_diagonal(g: Any, x: Any) -> np.ndarray:
    h, out = np.zeros(F), []
    for t in range(len(x)):
        h = np.exp(g[t]) * h + x[t]
        out.append(h)
    return np.asarray(out)


def loop_rwkv(k: Any, u: Any, v: Any, g: Any, one: Any) -> np.ndarray:
    n, d, out = np.zeros(F), np.zeros(F), []
    for t in range(len(k)):
        e = np.exp(k[t] + u[t])
        out.append((n + e * v[t]) / (d + e))
        n = np.exp(g[t]) * n + one[t] * np.exp(k[t]) * v[t]
        d = np.exp(g[t]) * d + one[t] * np.exp(k[t])
    return np.asarray(out)


def draw(n: int) -> dict[str, Any]:
    """Inputs of each step, [n, ...] float32, and its zero state."""
    rng = np.random.default_rng(n)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(n, *shape)).astype(np.float32)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v = unit(normal(H, K)), unit(normal(H, K)), normal(H, V)
    beta = 2 / (1 + np.exp(-normal(H)))
    heads, channels = -np.abs(normal(H, 1)), -np.exp(2 * normal(H, K))
    sums = dict.fromkeys("ndm", jnp.zeros((1, F)))
    rwkv = {"k": 9 * normal(F), "u": normal(F), "v": normal(F), "g": -np.exp(normal(F))}
    rwkv["one"] = np.ones((n, F), np.float32)
    state = jnp.zeros((1, H, K, V))
    return {
        "delta": (delta_rule, loop_delta, (q, k, v, heads, beta), state),
        "kimi": (delta_rule, loop_delta, (q, k, v, channels, beta), state),
        "lightning": (linear_attention, loop_linear, (q, k, v, heads), state),
        "rg_lru": (diagonal, loop_diagonal, (channels.reshape(n, -1)[:, :F], normal(F)), sums["n"]),
        "rwkv": (time_mixing, loop_rwkv, rwkv, sums),
    }


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "short_conv"])
def test_a_chunk_is_a_loop(name: str) -> None:
    """Two chunks with sequences that begin in them, and places without a token, of zeros."""
    step, loop, inputs, state = draw(23)[name]
    ends = [0, 6, 7, 19, 23]
    expected = []
    for a, b in pairwise(ends):
        part = jax.tree.map(lambda x, a=a, b=b: x[a:b].astype(np.float64), inputs)
        expected.append(loop(**part) if isinstance(part, dict) else loop(*part))
    got, run = [], jax.jit(step)
    for now in (slice(0, 13), slice(13, 23)):
        n = now.stop - now.start
        # Places without a token at the end of each chunk.
        part = jax.tree.map(
            lambda x, now=now, n=n: np.pad(x[now], ((0, 16 - n), *((0, 0),) * (x.ndim - 1)))[None],
            inputs,
        )
        begun = np.searchsorted([6, 7, 19], np.arange(now.start, now.stop), side="right")
        begun = np.pad(begun - (now.start > 0) * 2, (0, 16 - n), mode="edge")[None]
        state, y = run(state, part, jnp.asarray(begun, jnp.int32))
        got.append(np.asarray(y)[0, :n])
    near(np.concatenate(got), np.concatenate(expected), 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_every_execution_mode_matches_separate_sequences(name: str) -> None:
    """Packed rows, rows of a cache and sequences of a server are sequences alone."""
    mixer, rng = made(name), np.random.default_rng(2)
    x = rng.normal(size=(4, 24, D)).astype(np.float32)
    short, long = runs(mixer, 4), runs(mixer, 64)
    segments = np.ones((4, 24), np.int32)
    segments[0] = np.repeat([0, 1, 2, 3, 0, 4], [2, 9, 1, 6, 2, 4])
    for_one = np.zeros((4, 24), np.int32)  # each document of row 0 at the front of a row
    documents = np.zeros((4, 24, D), np.float32)
    for i, document in enumerate(segments[0] == s for s in range(1, 5)):
        n = document.sum()
        for_one[i, :n], documents[i, :n] = 1, x[0, document]
    alone = np.asarray(short(documents, ctx_of(for_one), None)[0])
    expected = np.asarray(short(x, ctx_of(np.ones((4, 24), np.int32)), None)[0])
    other = x + (segments == 1)[..., None]
    for run in (short, long):
        near(run(x, ctx_of(np.ones((4, 24), np.int32)), None)[0], expected)
        out = np.asarray(run(x, ctx_of(segments), None)[0])
        for i in range(4):
            at = segments[0] == i + 1
            near(out[0, at], alone[i, : at.sum()])
        # Another document does not change a single bit.
        again = np.asarray(run(other, ctx_of(segments), None)[0])
        np.testing.assert_array_equal(again[0, 11:], out[0, 11:])
    for got, row in zip(served(short, mixer.cache_spec, x), expected, strict=True):
        near(got, row[: len(got)])
    real = np.ones((4, 24), np.int32)
    real[0, :3] = real[1, 2:4] = real[1, 19] = real[2, :18] = 0
    out = in_steps(long, mixer.cache_spec, x, real)
    for row in range(4):
        n = real[row].sum()
        front = np.zeros_like(x)
        front[row, :n] = x[row, real[row] != 0]
        mask = np.where(np.arange(24) < n, 1, 0)[None].repeat(4, axis=0)
        near(out[row, real[row] != 0], short(front, ctx_of(mask), None)[0][row, :n])


@with_library
@pytest.mark.daily("lightning")
@pytest.mark.parametrize("name", MIXERS)
def test_one_order_of_sums_gives_every_execution_mode_the_same_bits(name: str) -> None:
    check_bits(made(name), np.random.default_rng(4).normal(size=(4, 24, D)).astype(np.float32))


@with_library
@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_gradients_with_one_order_of_sums_are_the_ordinary_gradients(name: str) -> None:
    check_gradients(made(name), np.random.default_rng(5).normal(size=(2, 9, D)).astype(np.float32))


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_packed_gradients_equal_sum_of_document_gradients(name: str) -> None:
    """Of packed documents: the sum of those of each, of parameters too."""
    mixer, rng = made(name), np.random.default_rng(3)
    x = rng.normal(size=(1, 14, D)).astype(np.float32)
    graphdef, state = nnx.split(mixer)

    def loss(state: Any, x: Any, segments: Any) -> Any:
        merged = nnx.merge(graphdef, state)
        merged.chunk = 4
        y = merged(x, ctx_of(segments), None, 0)[0]
        return jnp.sum(jnp.square(y) * (segments != 0)[..., None])

    grad = jax.jit(jax.grad(loss, (0, 1)))
    got = grad(state, x, np.asarray([[*[1] * 6, *[2] * 8]], np.int32))
    first = grad(state, x, np.asarray([[*[1] * 6, *[0] * 8]], np.int32))
    second = grad(state, x, np.asarray([[*[0] * 6, *[1] * 8]], np.int32))
    jax.tree.map(lambda a, b, c: near(a, b + c, 2e-4), got, first, second)


def test_the_slope_of_the_root_is_bounded() -> None:
    assert jax.grad(root)(0.0) == pytest.approx(1000)
    assert jax.grad(root)(0.25) == pytest.approx(1)


def test_lightning_rates_match_transformers() -> None:
    """Those of transformers' `MiniMaxLightningAttention.get_slope_rate`."""
    mixer = made("lightning")
    base = 1 / 2 ** (8 / H)
    expected = base ** (np.arange(H) + 1) * (1 - 1 / (2 + 1e-5) + 1e-5)
    near(mixer.rates(1), expected)
