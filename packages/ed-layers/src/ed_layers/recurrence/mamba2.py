"""Mamba-2 (Dao & Gu 2024): one decay for each head, so that chunks are matrix products.

For every head, with the step `dt[t]` and states [p, n]:

    h[t] = exp(dt[t] A) h[t - 1] + dt[t] x[t] B[t]^T,   y[t] = h[t] C[t] + D x[t]

Legend: b batch, s sequence, d hidden, r rows, c columns (t, u), h heads, p head dim, g groups, k
heads of a group, n states.
"""

from __future__ import annotations

from functools import partial
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
from ed_layers.recurrence.mamba import TIME_STEP, log_levels, step_bias
from ed_layers.recurrence.rows import CHUNK, Rows, reach


class Mamba2Mixer(nnx.Module):
    """The layer of Mamba-2, with the parameter names of Hugging Face, except two split tensors.

    `in_proj` is split into `z_proj`, `in_proj`, `bc_proj` and `dt_proj`, and `conv1d` into `conv1d`
    of the heads and `bc_conv1d`: the heads are split over devices, but B and C are shared by heads.
    The states are [h, p, n] in float32, and the states of the convolutions.

    Args:
        parts: creates the projections.
        heads, head_dim: h, p.
        states: n.
        groups: g; the heads of a group share B and C, and one norm.
        taps: taps of the convolution.
        bias: whether the input projections have a bias.
        out_bias: whether the output projection has a bias; None = the value of `bias`.
        conv_bias: whether the convolution has a bias.
        norm_eps: epsilon of the gated norm; None = a gate without a norm (Falcon-H1).
        gate_first: whether the gate precedes the norm.
        hidden_act: Hugging Face's name of the activation; default: the configuration's activation.
        dt_limits: bounds of the step sizes.
        multipliers: factors on the projected gate, x, B, C and dt (Falcon-H1).
        time_step: see `ed_layers.recurrence.mamba.TIME_STEP`.
        chunk: number of tokens that are computed in parallel.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        heads: int,
        head_dim: int,
        states: int,
        groups: int,
        taps: int,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        norm_eps: float | None,
        gate_first: bool = True,
        hidden_act: str | None = None,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
        multipliers: tuple[float, ...] = (1.0,) * 5,
        time_step: tuple[float, float, float] = TIME_STEP,
        chunk: int = CHUNK,
    ):
        d, h, p, n = parts.config.hidden_size, heads, head_dim, states
        self.z_proj = parts.linear(d, h * p, axes=("embed", "heads"), bias=bias)
        self.in_proj = parts.linear(d, h * p, axes=("embed", "heads"), bias=bias)
        self.bc_proj = parts.linear(d, 2 * groups * n, axes=("embed", None), bias=bias)
        self.dt_proj = parts.linear(d, h, axes=("embed", "heads"), bias=bias)
        self.conv1d = ShortConv(parts, h * p, taps, bias=conv_bias, axis="heads")
        self.bc_conv1d = ShortConv(parts, 2 * groups * n, taps, bias=conv_bias, axis=None)
        self.dt_bias = nnx.Param(step_bias(parts, h, time_step), axes=("heads",))
        levels = log_levels(h)
        self.A_log = nnx.Param(levels.astype(parts.param_dtype), axes=("heads",))
        self.D = nnx.Param(jnp.ones((h,), parts.param_dtype), axes=("heads",))
        self.has_norm = norm_eps is not None
        if norm_eps is not None:
            self.norm = GatedRMSNorm(
                h * p,
                eps=norm_eps,
                groups=groups,
                gate_first=gate_first,
                dtype=parts.dtype,
                param_dtype=parts.param_dtype,
            )
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = parts.linear(h * p, d, axes=("heads", "embed"), bias=out_bias)
        self.hidden_act = hidden_act or parts.config.hidden_act
        activation(self.hidden_act)
        self.dt_limits, self.multipliers = tuple(dt_limits), tuple(multipliers)
        self.sizes, self.chunk = (groups, h, p, n), chunk
        self.dtype, self.precision = parts.dtype, parts.precision
        self.cache_spec = RecurrentSpec(
            (
                self.conv1d.state_spec(),
                self.bc_conv1d.state_spec("bc_conv"),
                StateSpec("ssm", (h, p, n)),
            )
        )

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the mixer, and the cache."""
        x = ctx.name_activation(x, "normed_input")
        g, h, p, n = self.sizes
        z_multiplier, x_multiplier, b_multiplier, c_multiplier, dt_multiplier = self.multipliers
        act = activation(self.hidden_act)
        rows = Rows.of(ctx, (x.shape[0], x.shape[1]), cache, chunk=self.chunk)
        states = rows.states(cache, layer, self.cache_spec)
        u = rows.enter(self.in_proj(x, ctx) * x_multiplier, "heads")
        u, states["conv"] = self.conv1d(u, states["conv"], rows)
        bc = jnp.split(rows.enter(self.bc_proj(x, ctx)), 2, axis=-1)
        bc = jnp.concatenate([bc[0] * b_multiplier, bc[1] * c_multiplier], axis=-1)
        bc, states["bc_conv"] = self.bc_conv1d(bc, states["bc_conv"], rows)
        u = act(u).astype(jnp.float32).reshape(*u.shape[:2], h, p)
        bc = act(bc).astype(jnp.float32).reshape(*bc.shape[:2], 2, g, n)
        # A step size of zero at padding does not change the state.
        dt = rows.enter(self.dt_proj(x, ctx) * dt_multiplier, "heads")
        dt = rows.mask_padding(self.steps(dt))
        rates = -jnp.exp(self.A_log.get_value().astype(jnp.float32))
        step = partial(state_space_dual, rates, precision=self.precision)
        inputs = u, dt, bc[:, :, 0], bc[:, :, 1]
        y, states["ssm"] = rows.scan(step, states["ssm"], inputs, partial(dual_terms, rates))
        y = y + self.D.get_value().astype(jnp.float32)[:, None] * u
        y = rows.leave(y.reshape(*y.shape[:2], h * p))
        cache = rows.store(cache, layer, states, self.cache_spec)
        z = self.z_proj(x, ctx) * z_multiplier
        y = self.norm(y, z) if self.has_norm else (y * act(z)).astype(self.dtype)
        return self.out_proj(y, ctx), cache

    def steps(self, dt: Float[Array, "r c h"]) -> Float[Array, "r c h"]:
        """Return the step sizes, float32."""
        dt = dt.astype(jnp.float32) + self.dt_bias.get_value().astype(jnp.float32)
        return jnp.clip(jax.nn.softplus(dt), *self.dt_limits)


def dual_terms(
    rates: Float[Array, " h"], inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> Terms:
    """Return the terms of `state_space_dual`, with its arguments."""
    x, dt, b, c = inputs
    decay = jnp.exp(dt * rates)[..., None]
    return Terms(c, b, x * dt[..., None], decay, keys_last=True)


def state_space_dual(
    rates: Float[Array, " h"],
    state: Float[Array, "r h p n"],
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    begun: Int[Array, "r c"] | None,
    *,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "r h p n"], Float[Array, "r c h p"]]:
    """Compute one chunk of the recurrence, without `D x`; a `Step` of `Rows.scan`.

    Within the chunk, pairs of tokens are computed as in attention, with decays instead of a
    softmax. The state contains all earlier tokens.

    Args:
        rates: A, negative.
        state: state before the chunk.
        inputs: x [r, c, h, p], dt [r, c, h], B and C [r, c, g, n], all float32.
        begun: see `Step`.
    """
    x, dt, b, c = inputs
    rows, columns, h, p = x.shape
    g, n = b.shape[2:]
    product = partial(jnp.einsum, precision=precision)
    reached = reach(begun, columns)
    # Sums of logarithms since the begin of a sequence, or of the chunk. Earlier tokens do not
    # contribute, not even rounding errors.
    logs = jnp.matmul(
        reached.astype(jnp.float32), dt * rates, precision=jax.lax.Precision.HIGHEST
    ).swapaxes(1, 2)
    gaps = jnp.where(reached[:, None], logs[..., :, None] - logs[..., None, :], -jnp.inf)
    decay = jnp.exp(gaps).reshape(rows, g, h // g, columns, columns)
    scores = product("rtgn,rugn->rgtu", c, b)
    added = (x * dt[..., None]).reshape(rows, columns, g, h // g, p)
    out = product("rgktu,rugkp->rtgkp", decay * scores[:, :, None], added)
    state_decay = jnp.exp(logs)
    if begun is not None:
        state_decay = jnp.where((begun == 0)[:, None], state_decay, 0)
    state = state.reshape(rows, g, h // g, p, n)
    state_decay = state_decay.reshape(rows, g, h // g, columns)
    recalled = product("rtgn,rgkpn->rtgkp", c, state) * jnp.moveaxis(state_decay, 3, 1)[..., None]
    out = out + recalled
    to_end = jnp.moveaxis(decay[..., -1, :], 3, 1)[..., None]
    new = product("rugn,rugkp->rgkpn", b, added * to_end)
    new = state_decay[..., -1, None, None] * state + new
    return new.reshape(rows, h, p, n), out.reshape(rows, columns, h, p)
