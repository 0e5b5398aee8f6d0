"""The gated delta rule (Yang et al. 2024), with a decay of each head or of each channel.

    S = exp(g[t]) S;  S = S + beta[t] k[t] (v[t] - S^T k[t])^T;  y[t] = S^T q[t]

A token writes the difference between its value and the value that the state returns for its key.
Within a chunk, the writes are the solution of a triangular system (the WY form).

Legend: b batch, s sequence, d hidden, q rows, c tokens, h value heads, g key heads, k numbers of a
key, v numbers of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.activations import activation
from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec, StateSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.native.recurrences import Terms
from ed_layers.norms import GatedRMSNorm
from ed_layers.parts import Parts
from ed_layers.recurrence.conv import ShortConv
from ed_layers.recurrence.decay import Decay
from ed_layers.recurrence.rows import CHUNK, Rows
from ed_layers.sums import total

#: Arguments of `delta_rule` for each token: q, k [.., h, k], v [.., h, v], g [.., h, 1 or k], beta
#: [.., h].
DeltaInputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def delta_terms(inputs: DeltaInputs) -> Terms:
    """Return the terms of `delta_rule`."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in inputs)
    return Terms(q, k, v, jnp.exp(g), beta=beta)


def delta_rule(
    state: Float[Array, "q h k v"], inputs: DeltaInputs, begun: Int[Array, "q c"] | None
) -> tuple[Float[Array, "q h k v"], Float[Array, "q c h v"]]:
    """Compute the recurrence over a chunk, float32; a `Step` of `Rows.scan`.

    A token with g = 0 and beta = 0 does not change the state.
    """
    q, k, v, g, beta = (x.astype(jnp.float32) for x in inputs)
    decay, beta = Decay.of(g, begun), beta[..., None]
    u = beta * (v - decay.read(k, state))
    if u.shape[1] > 1:
        # The scores are the part of token j in the value that token i reads: u[i] = beta (v - S^T
        # k)[i] - sum_j<i.
        recalled = decay.scores(beta * k, k)
        columns = jnp.moveaxis(u, 1, 2)
        columns = jax.scipy.linalg.solve_triangular(
            recalled, columns, lower=True, unit_diagonal=True
        )
        u = jnp.moveaxis(columns, 2, 1)
    return decay.write(k, u, state), decay.attend(q, k, u, state)


class GatedDelta(nnx.Module):
    """A mixer with the gated delta rule, with the parameter names of Qwen3-Next and OLMo Hybrid.

    Queries, keys and values pass a short convolution and an activation; queries and keys have
    length 1. `g = -exp(A_log) softplus(a_proj(x) + dt_bias)`, `beta = sigmoid(b_proj(x))`.

    Args:
        parts: creates the projections.
        key_heads, value_heads: g and h; a key head serves h / g value heads.
        key_dim, value_dim: k and v.
        taps: taps of the convolutions.
        beta_scale: factor on beta; with 2, the state may change its sign (Grazzi et al. 2024).
        eps: epsilon of the norm of the outputs.
        rates: range of the initial `exp(A_log)`.
        steps: range of the initial `softplus(dt_bias)`, which is log-uniform.
    """

    #: Number of tokens that are computed in parallel.
    chunk = CHUNK
    #: Activation of the output gate.
    gate_act: Callable[[jax.Array], jax.Array] = staticmethod(jax.nn.silu)

    def __init__(
        self,
        parts: Parts,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        beta_scale: float = 1.0,
        eps: float | None = None,
        rates: tuple[float, float] = (1.0, 16.0),
        steps: tuple[float, float] = (1e-3, 1e-1),
    ):
        config = parts.config
        d, keys, values = config.hidden_size, key_heads * key_dim, value_heads * value_dim
        for name, features in (("q", keys), ("k", keys), ("v", values)):
            setattr(self, f"{name}_proj", parts.linear(d, features, axes=("embed", "heads")))
            setattr(self, f"{name}_conv1d", ShortConv(parts, features, taps, axis="heads"))
        self.b_proj = parts.linear(d, value_heads, axes=("embed", "heads"))
        self.key_dim, self.value_dim, self.value_heads = key_dim, value_dim, value_heads
        self.add_gates(parts, rates, steps)
        self.o_norm = GatedRMSNorm(
            value_dim,
            eps=config.rms_norm_eps if eps is None else eps,
            gate_first=False,
            act=self.gate_act,
            dtype=parts.dtype,
            param_dtype=parts.param_dtype,
        )
        self.o_proj = parts.linear(values, d, axes=("heads", "embed"))
        self.beta_scale, self.hidden_act = beta_scale, config.hidden_act
        activation(self.hidden_act)
        convs = (getattr(self, f"{name}_conv1d").state_spec(f"{name}_conv") for name in "qkv")
        self.cache_spec = RecurrentSpec(
            (*convs, StateSpec("delta", (value_heads, key_dim, value_dim)))
        )

    def add_gates(
        self, parts: Parts, rates: tuple[float, float], steps: tuple[float, float]
    ) -> None:
        """Create the parameters of `log_decay` and `gate`."""
        d, h = parts.config.hidden_size, self.value_heads
        self.a_proj = parts.linear(d, h, axes=("embed", "heads"))
        self.g_proj = parts.linear(d, h * self.value_dim, axes=("embed", "heads"))
        self.A_log = nnx.Param(log_rates(parts, (h,), rates), axes=("heads",))
        self.dt_bias = nnx.Param(step_biases(parts, (h,), steps), axes=("heads",))

    def log_decay(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s h one_or_k"]:
        """Return the log of the decay, float32."""
        a = self.a_proj(x, ctx).astype(jnp.float32) + self.dt_bias.get_value().astype(jnp.float32)
        rate = jnp.exp(self.A_log.get_value().astype(jnp.float32))
        return (-rate * jax.nn.softplus(a))[..., None]

    def gate(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s hv"]:
        """Return the gate of the outputs, before its activation."""
        return self.g_proj(x, ctx)

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the mixer, and the cache."""
        x = ctx.name_activation(x, "normed_input")
        b, s, _ = x.shape
        rows = Rows.of(ctx, (b, s), cache, chunk=self.chunk)
        states = rows.states(cache, layer, self.cache_spec)

        def project_and_convolve(name: str, size: int) -> jax.Array:
            y = rows.enter(getattr(self, f"{name}_proj")(x, ctx), "heads")
            conv, state = getattr(self, f"{name}_conv1d"), states[f"{name}_conv"]
            y, states[f"{name}_conv"] = conv(y, state, rows)
            y = activation(self.hidden_act)(y).astype(jnp.float32)
            return y.reshape(*y.shape[:2], -1, size)

        q = _unit(project_and_convolve("q", self.key_dim))
        k = _unit(project_and_convolve("k", self.key_dim))
        v = project_and_convolve("v", self.value_dim)
        shared = self.value_heads // k.shape[2]
        q, k = (jnp.repeat(y, shared, axis=2) for y in (q * self.key_dim**-0.5, k))
        g = rows.mask_padding(rows.enter(self.log_decay(x, ctx), "heads"))
        beta = jax.nn.sigmoid(self.b_proj(x, ctx)).astype(jnp.float32)
        beta = beta * self.beta_scale
        beta = rows.mask_padding(rows.enter(beta, "heads"))
        inputs = q, k, v, g, beta
        y, states["delta"] = rows.scan(delta_rule, states["delta"], inputs, delta_terms)
        cache = rows.store(cache, layer, states, self.cache_spec)
        y = rows.leave(y)
        y = ctx.name_activation(self.o_norm(y, self.gate(x, ctx).reshape(y.shape)), "attn_output")
        return ctx.name_activation(self.o_proj(y.reshape(b, s, -1), ctx), "attn_dense"), cache


class KimiDelta(GatedDelta):
    """Kimi delta attention (Kimi Team 2025): each channel of a key has a separate decay.

    Low-rank projections compute the decays and the output gate; the gate is a sigmoid.
    """

    chunk = 16  # each channel has its own pairs of tokens
    gate_act = staticmethod(jax.nn.sigmoid)

    def add_gates(
        self, parts: Parts, rates: tuple[float, float], steps: tuple[float, float]
    ) -> None:
        d, h, keys = parts.config.hidden_size, self.value_heads, self.value_heads * self.key_dim
        values = h * self.value_dim
        self.f_a_proj = parts.linear(d, self.key_dim, axes=("embed", None))
        self.f_b_proj = parts.linear(self.key_dim, keys, axes=(None, "heads"))
        self.g_a_proj = parts.linear(d, self.value_dim, axes=("embed", None))
        self.g_b_proj = parts.linear(self.value_dim, values, axes=(None, "heads"))
        log_rate = log_rates(parts, (1, 1, h, 1), rates)
        self.A_log = nnx.Param(log_rate, axes=(None, None, "heads", None))
        self.dt_bias = nnx.Param(step_biases(parts, (keys,), steps), axes=("heads",))

    def log_decay(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s h one_or_k"]:
        a = self.f_b_proj(self.f_a_proj(x, ctx), ctx).astype(jnp.float32)
        a = a + self.dt_bias.get_value().astype(jnp.float32)
        rate = jnp.exp(self.A_log.get_value().astype(jnp.float32))
        return -rate * jax.nn.softplus(a).reshape(*a.shape[:2], self.value_heads, -1)

    def gate(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s hv"]:
        return self.g_b_proj(self.g_a_proj(x, ctx), ctx)


def _unit(x: Float[Array, "*dims k"]) -> Float[Array, "*dims k"]:
    """Scale vectors to length 1."""
    return x * jax.lax.rsqrt(total(jnp.square(x)) + 1e-6)


def log_rates(parts: Parts, shape: tuple[int, ...], rates: tuple[float, float]) -> jax.Array:
    """Draw logarithms of numbers between the two `rates`."""
    low, high = rates
    rate = jax.random.uniform(parts.rngs.params(), shape, minval=low, maxval=high)
    return jnp.log(jnp.maximum(rate, 1e-4)).astype(parts.param_dtype)


def step_biases(parts: Parts, shape: tuple[int, ...], steps: tuple[float, float]) -> jax.Array:
    """Draw numbers whose softplus is log-uniform between the two `steps`."""
    low, high = (jnp.log(step) for step in steps)
    step = jnp.exp(jax.random.uniform(parts.rngs.params(), shape, minval=low, maxval=high))
    step = jnp.maximum(step, 1e-4)
    return (step + jnp.log(-jnp.expm1(-step))).astype(parts.param_dtype)
