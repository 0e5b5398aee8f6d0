"""Mamba and Mamba-2: chunks of any size equal a loop over tokens, and documents do not leak."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.masks import MaskInfo
from ed_layers.context import Ctx
from ed_layers.norms import RMSNorm
from ed_layers.parts import Parts
from ed_layers.recurrence.mamba import MambaMixer
from ed_layers.recurrence.mamba2 import Mamba2Mixer
from flax import nnx
from recurrence_cases import check_bits, check_gradients, with_library

D = 6
CONFIG = SimpleNamespace(hidden_size=D, initializer_range=0.5, hidden_act="silu")
SIZES = {"channels": 8, "states": 3, "taps": 4, "rank": 2}
HEADS = {"heads": 4, "head_dim": 2, "states": 3, "groups": 2, "taps": 3}
MIXERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba": (MambaMixer, SIZES),
    "mamba, norms, biases": (
        MambaMixer,
        {**SIZES, "norm": partial(RMSNorm, eps=0.01), "bias": True, "conv_bias": False},
    ),
    "mamba2": (Mamba2Mixer, {**HEADS, "norm_eps": 0.01}),
    "mamba2, norm first, limits, factors": (
        Mamba2Mixer,
        {
            **HEADS,
            "norm_eps": 0.01,
            "gate_first": False,
            "bias": True,
            "dt_limits": (0.05, 0.4),
            "multipliers": (0.7, 1.3, 0.8, 1.6, 0.9),
        },
    ),
    "mamba2, no norm": (Mamba2Mixer, {**HEADS, "norm_eps": None, "conv_bias": False}),
}


def made(name: str, chunk: int) -> nnx.Module:
    """A mixer with steps and decays of every size, the same for every chunk."""
    kind, form = MIXERS[name]
    mixer = kind(Parts(CONFIG, nnx.Rngs(0)), **form, time_step=(0.02, 2.0, 0.0), chunk=chunk)
    draw = np.random.default_rng(0)
    for path, variable in nnx.to_flat_state(nnx.state(mixer)):
        if path[-1] in ("bias", "D", "weight", "dt_bias"):
            value = variable.get_value()
            noise = draw.normal(scale=0.5, size=value.shape)
            nnx.update(mixer, nnx.from_flat_state([(path, nnx.Param(value + noise))]))
    return mixer


def run(mixer: Any, x: Any, segments: Any) -> Any:
    """The outputs [b, s, d] of packed rows."""
    info = MaskInfo.from_segments(jnp.asarray(segments))
    return mixer(jnp.asarray(x), Ctx(jnp.zeros(segments.shape, jnp.int32), {}, info), None, 0)[0]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray, groups: int = 1) -> np.ndarray:
    parts = x.reshape(*x.shape[:-1], groups, -1)
    parts = parts / np.sqrt(np.square(parts).mean(axis=-1, keepdims=True) + 0.01)
    return parts.reshape(x.shape) * weight


class Loop:
    """A mixer in float64, token by token."""

    def __init__(self, mixer: Any):
        self.mixer, flat = mixer, nnx.to_flat_state(nnx.state(mixer))
        self.p = {".".join(map(str, k)): np.asarray(v.get_value(), np.float64) for k, v in flat}

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.p[f"{name}.kernel"] + self.p.get(f"{name}.bias", 0)

    def conv(self, name: str, x: np.ndarray) -> np.ndarray:
        kernel = self.p[f"{name}.kernel"][:, 0]
        padded = np.pad(x, ((len(kernel) - 1, 0), (0, 0)))
        out = [(padded[t : t + len(kernel)] * kernel).sum(axis=0) for t in range(len(x))]
        return silu(np.asarray(out) + self.p.get(f"{name}.bias", 0))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs [n, d] of one sequence."""
        form = self.mamba if isinstance(self.mixer, MambaMixer) else self.mamba2
        return self.project("out_proj", form(np.asarray(x, np.float64)))

    def mamba(self, x: np.ndarray) -> np.ndarray:
        u = self.conv("conv1d", self.project("in_proj", x))
        dt, b, c = np.split(self.project("x_proj", u), (2, 5), axis=-1)
        if self.mixer.has_norms:
            dt, b, c = (
                rms(y, self.p[f"{name}_layernorm.weight"])
                for name, y in (("dt", dt), ("b", b), ("c", c))
            )
        dt = np.logaddexp(0, self.project("dt_proj", dt))
        h, out = np.zeros((8, 3)), []
        for t in range(len(x)):
            h = np.exp(-dt[t][:, None] * np.exp(self.p["A_log"])) * h
            h = h + (dt[t] * u[t])[:, None] * b[t]
            out.append(h @ c[t] + self.p["D"] * u[t])
        return np.asarray(out) * silu(self.project("z_proj", x))

    def mamba2(self, x: np.ndarray) -> np.ndarray:
        _, form = next(v for v in MIXERS.values() if v[0] is Mamba2Mixer and self.fits(v[1]))
        of_z, of_x, of_b, of_c, of_dt = form.get("multipliers", (1,) * 5)
        u = self.conv("conv1d", self.project("in_proj", x) * of_x).reshape(-1, 4, 2)
        bc = self.project("bc_proj", x) * np.repeat([of_b, of_c], 6)
        b, c = np.moveaxis(self.conv("bc_conv1d", bc).reshape(-1, 2, 2, 3), 1, 0)
        dt = np.logaddexp(0, self.project("dt_proj", x) * of_dt + self.p["dt_bias"])
        dt = np.clip(dt, *form.get("dt_limits", (0, np.inf)))
        h, out = np.zeros((4, 2, 3)), []
        for t in range(len(x)):
            h = np.exp(-dt[t] * np.exp(self.p["A_log"]))[:, None, None] * h
            of_head = np.repeat(b[t], 2, axis=0)[:, None]
            h = h + (dt[t][:, None] * u[t])[..., None] * of_head
            y = np.einsum("hpn,hn->hp", h, np.repeat(c[t], 2, axis=0))
            out.append((y + self.p["D"][:, None] * u[t]).reshape(-1))
        gate, y = silu(self.project("z_proj", x) * of_z), np.asarray(out)
        if form["norm_eps"] is None:
            return y * gate
        weight = self.p["norm.weight"]
        if form.get("gate_first", True):
            return rms(y * gate, weight, 2)
        return rms(y, weight, 2) * gate

    def fits(self, form: dict[str, Any]) -> bool:
        """Whether the mixer has this form."""
        eps = None if not self.mixer.has_norm else 0.01
        factors = tuple(form.get("multipliers", (1.0,) * 5))
        return form["norm_eps"] == eps and factors == self.mixer.multipliers


SEGMENTS = np.asarray(
    [[0, 0, *[1] * 9, *[2] * 1, *[3] * 4, 0, 0, *[4] * 3], [*[1] * 6, *[2] * 15]], np.int32
)


def inputs(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*SEGMENTS.shape, D)).astype(np.float32)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "chunk"),
    [*((name, 5) for name in MIXERS), *((n, c) for n in ("mamba", "mamba2") for c in (1, 64))],
)
def test_chunks_are_a_loop_over_tokens(name: str, chunk: int) -> None:
    mixer, x = made(name, chunk), inputs()
    out = np.asarray(jax.jit(partial(run, mixer))(x, SEGMENTS))
    loop = Loop(mixer)
    for row in range(2):
        for segment in range(1, SEGMENTS[row].max() + 1):
            at = SEGMENTS[row] == segment
            np.testing.assert_allclose(out[row, at], loop(x[row, at]), rtol=1e-5, atol=1e-5)
    # Another document, or the content of padding, does not change a single bit.
    x[0, :11] += 1
    x[0, 16:18] = 1e3
    again = np.asarray(jax.jit(partial(run, mixer))(x, SEGMENTS))
    np.testing.assert_array_equal(again[0, 11:16], out[0, 11:16])
    np.testing.assert_array_equal(again[0, 18:], out[0, 18:])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mamba, norms, biases", "mamba2"])
def test_gradients_of_a_document_are_those_of_a_sequence_alone(name: str) -> None:
    x, weights, segment = inputs(1), inputs(2), (slice(1, 2), slice(6, 21))

    def loss(state: Any, x: Any, weights: Any, segments: Any, graphdef: Any) -> Any:
        return jnp.sum(run(nnx.merge(graphdef, state), x, segments) * weights)

    def gradients(chunk: int, x: Any, weights: Any, segments: Any) -> Any:
        graphdef, state = nnx.split(made(name, chunk))
        take = jax.jit(jax.grad(partial(loss, graphdef=graphdef), argnums=(0, 1)))
        return take(state, x, weights, segments)

    only = np.zeros_like(weights)
    only[segment] = weights[segment]
    packed, to_x = gradients(5, x, only, SEGMENTS)
    alone, to_segment = gradients(64, x[segment], weights[segment], np.ones((1, 15), np.int32))
    np.testing.assert_allclose(to_x[segment], to_segment, rtol=1e-4, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), packed, alone)
    elsewhere = np.asarray(to_x).copy()
    elsewhere[segment] = 0
    assert not elsewhere.any()


@with_library
@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_one_order_of_sums_gives_every_execution_mode_the_same_bits(name: str) -> None:
    draw = np.random.default_rng(4)
    check_bits(made(name, 64), draw.normal(size=(4, 24, D)).astype(np.float32))


@with_library
@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_gradients_with_one_order_of_sums_are_the_ordinary_gradients(name: str) -> None:
    draw = np.random.default_rng(5)
    check_gradients(made(name, 4), draw.normal(size=(2, 9, D)).astype(np.float32))


@pytest.mark.nightly
def test_long_chunks_with_fast_decays_stay_finite() -> None:
    """Steps of up to 60 over 64 tokens: products of decays that no float32 holds."""
    for name in ("mamba", "mamba2"):
        graphdef, state = nnx.split(made(name, 64))
        x = np.random.default_rng(3).normal(scale=30, size=(1, 64, D)).astype(np.float32)

        def loss(state: Any, graphdef: Any = graphdef, x: Any = x) -> Any:
            return jnp.sum(jnp.square(run(nnx.merge(graphdef, state), x, np.ones((1, 64), int))))

        value, grads = jax.jit(jax.value_and_grad(loss))(state)
        assert np.isfinite(value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
