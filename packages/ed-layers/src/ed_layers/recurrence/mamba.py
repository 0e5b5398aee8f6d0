"""Mamba (Gu & Dao 2023): a state space whose step size, input and output follow the token.

For every channel f and state n, with the step `dt[t]`:

    h[t] = exp(dt[t] A) h[t - 1] + dt[t] B[t] u[t],   y[t] = sum over n of C[t] h[t] + D u[t]

Legend: b batch, s sequence, d hidden, r rows, c columns, f channels, n states of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.activations import activation
from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec, StateSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.native.recurrences import Terms
from ed_layers.parts import Parts
from ed_layers.recurrence.conv import ShortConv
from ed_layers.recurrence.rows import Rows

#: Number of tokens that are computed in parallel: few, because each token needs the states of all
#: channels in memory.
MAMBA_CHUNK = 16
#: Smallest and largest step size at the start of training, and the lower bound of all step sizes.
TIME_STEP = (1e-3, 1e-1, 1e-4)


class MambaMixer(nnx.Module):
    """The layer of Mamba, with the parameter names of Hugging Face, except that `in_proj` is
    `in_proj` and `z_proj` here.

    The states are [f, n] in float32, and the state of the convolution.

    Args:
        parts: creates the projections.
        channels: f.
        states: n.
        taps: taps of the convolution.
        rank: rank of the projection of step sizes.
        bias: whether the input and output projections have a bias.
        conv_bias: whether the convolution has a bias.
        norm: creates the norms of dt, B and C from their number of features (Jamba, Falcon-Mamba);
            None = no norms.
        hidden_act: Hugging Face's name of the activation; default: the configuration's activation.
        time_step: see `TIME_STEP`.
        chunk: number of tokens that are computed in parallel.
    """

    #: Layers whose inputs are rows of chunks, not the tokens of a batch.
    without_tokens: ClassVar[tuple[str, ...]] = ("x_proj", "dt_proj")

    def __init__(
        self,
        parts: Parts,
        *,
        channels: int,
        states: int,
        taps: int,
        rank: int,
        bias: bool = False,
        conv_bias: bool = True,
        norm: Callable[[int], nnx.Module] | None = None,
        hidden_act: str | None = None,
        time_step: tuple[float, float, float] = TIME_STEP,
        chunk: int = MAMBA_CHUNK,
    ):
        d, f, n = parts.config.hidden_size, channels, states
        self.in_proj = parts.linear(d, f, axes=("embed", "mlp"), bias=bias)
        self.z_proj = parts.linear(d, f, axes=("embed", "mlp"), bias=bias)
        self.conv1d = ShortConv(parts, f, taps, bias=conv_bias)
        self.x_proj = parts.linear(f, rank + 2 * n, axes=("mlp", None))
        self.dt_proj = parts.linear(rank, f, axes=(None, "mlp"), bias=True)
        self.dt_proj.bias.set_value(step_bias(parts, f, time_step))
        levels = jnp.broadcast_to(log_levels(n), (f, n))
        self.A_log = nnx.Param(levels.astype(parts.param_dtype), axes=("mlp", None))
        self.D = nnx.Param(jnp.ones((f,), parts.param_dtype), axes=("mlp",))
        self.out_proj = parts.linear(f, d, axes=("mlp", "embed"), bias=bias)
        self.has_norms = norm is not None
        if norm is not None:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = map(norm, (rank, n, n))
        self.hidden_act = hidden_act or parts.config.hidden_act
        activation(self.hidden_act)
        self.sizes, self.chunk, self.dtype = (rank, n), chunk, parts.dtype
        self.cache_spec = RecurrentSpec((self.conv1d.state_spec(), StateSpec("ssm", (f, n))))

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the mixer, and the cache."""
        x = ctx.name_activation(x, "normed_input")
        rows = Rows.of(ctx, (x.shape[0], x.shape[1]), cache, chunk=self.chunk)
        states = rows.states(cache, layer, self.cache_spec)
        u = rows.enter(self.in_proj(x, ctx), "mlp")
        u, states["conv"] = self.conv1d(u, states["conv"], rows)
        u = activation(self.hidden_act)(u)
        dt, b, c = self.project_terms(u)
        u = u.astype(jnp.float32)
        rates = -jnp.exp(self.A_log.get_value().astype(jnp.float32))
        # A step size of zero at padding does not change the state.
        inputs = u, rows.mask_padding(dt), b, c
        y, states["ssm"] = rows.scan(
            partial(selective_scan, rates), states["ssm"], inputs, partial(selective_terms, rates)
        )
        y = rows.leave(y.reshape(u.shape) + self.D.get_value().astype(jnp.float32) * u)
        cache = rows.store(cache, layer, states, self.cache_spec)
        gate = activation(self.hidden_act)(self.z_proj(x, ctx))
        return self.out_proj((y * gate).astype(self.dtype), ctx), cache

    def project_terms(self, u: Float[Array, "r c f"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the inputs that depend on the token: dt [r, c, f], B and C [r, c, n], float32."""
        rank, n = self.sizes
        dt, b, c = jnp.split(self.x_proj(u), (rank, rank + n), axis=-1)
        if self.has_norms:
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        dt = jax.nn.softplus(self.dt_proj(dt).astype(jnp.float32))
        return dt, b.astype(jnp.float32), c.astype(jnp.float32)


def selective_terms(
    rates: Float[Array, "f n"], inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> Terms:
    """Return the terms of `selective_scan`, with its arguments: a head has up to 64 channels."""
    u, dt, b, c = inputs
    heads = (u.shape[-1] // math.gcd(u.shape[-1], 64), -1)

    def split_heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], *heads)

    return Terms(
        c[:, :, None],
        b[:, :, None],
        split_heads(dt * u),
        split_heads(dt),
        rates=rates.reshape(*heads, rates.shape[-1]),
        keys_last=True,
    )


def selective_scan(
    rates: Float[Array, "f n"],
    state: Float[Array, "r f n"],
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    begun: Int[Array, "r c"] | None,
) -> tuple[Float[Array, "r f n"], Float[Array, "r c f"]]:
    """Compute one chunk of the recurrence, without `D u`; a `Step` of `Rows.scan`.

    Args:
        rates: A, negative.
        state: state before the chunk.
        inputs: u and dt [r, c, f], B and C [r, c, n], all float32.
        begun: see `Step`.
    """
    u, dt, b, c = inputs
    decay = jnp.exp(dt[..., None] * rates)
    added = (dt * u)[..., None] * b[:, :, None]
    if begun is not None:
        starts = jnp.diff(begun, axis=1, prepend=0) > 0
        decay = jnp.where(starts[..., None, None], 0, decay)

    def combine_steps(
        previous_step: tuple[jax.Array, jax.Array], next_step: tuple[jax.Array, jax.Array]
    ):
        return previous_step[0] * next_step[0], next_step[0] * previous_step[1] + next_step[1]

    decay, added = jax.lax.associative_scan(combine_steps, (decay, added), axis=1)
    states = decay * state[:, None] + added
    return states[:, -1], jnp.einsum("rcfn,rcn->rcf", states, c)


def log_levels(count: int) -> Float[Array, " n"]:
    """Return the logarithms of 1 to n. The host computes them, because XLA's logarithms have other
    bits on another mesh."""
    return jnp.asarray(np.log(np.arange(1.0, count + 1)), jnp.float32)


def step_bias(parts: Parts, size: int, time_step: tuple[float, float, float]) -> jax.Array:
    """Draw biases [size] whose softplus is log-uniform within `time_step`."""
    low, high, floor = time_step
    logs = jax.random.uniform(
        parts.rngs.params(), (size,), jnp.float32, jnp.log(low), jnp.log(high)
    )
    steps = jnp.maximum(jnp.exp(logs), floor)
    return (steps + jnp.log(-jnp.expm1(-steps))).astype(parts.param_dtype)
