"""The time mixing and the channel mixing of RWKV-4 (Peng et al. 2023).

A channel has a mean of values, weighted by decaying exponentials of their keys:

    y[t] = (n[t-1] + exp(u + k[t]) v[t]) / (d[t-1] + exp(u + k[t]))
    n[t] = exp(-w) n[t-1] + exp(k[t]) v[t];  d[t] = exp(-w) d[t-1] + exp(k[t])

`n` and `d` are stored divided by the exponential of a third number, the largest exponent so far.

Legend: b batch, s sequence, d hidden, r and q rows, c tokens, f channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.cache.protocol import States
from ed_layers.cache.spec import StateSpec
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.recurrence.rows import Rows

#: The largest exponent before the first token; a sum of three such numbers is still a float32.
_NOTHING = -1e38


class WeightedSums(NamedTuple):
    """Sums over consecutive tokens: `n exp(m)` and `d exp(m)`, and the log of the decay of earlier
    tokens. All arrays are [q, c, f]."""

    n: jax.Array
    d: jax.Array
    m: jax.Array
    g: jax.Array

    def then(self, right: WeightedSums) -> WeightedSums:
        """Return the sums over these tokens, followed by others."""
        m = jnp.maximum(self.m + right.g, right.m)
        old, new = jnp.exp(self.m + right.g - m), jnp.exp(right.m - m)
        return WeightedSums(
            old * self.n + new * right.n,
            old * self.d + new * right.d,
            m,
            self.g + right.g,
        )


def time_mixing(
    state: States, inputs: dict[str, Float[Array, "q c f"]], begun: Int[Array, "q c"] | None
) -> tuple[States, Float[Array, "q c f"]]:
    """Compute the recurrence over a chunk, float32; a `Step` of `Rows.scan`.

    Args:
        state: `n`, `d` and `m`, [q, f]; zeros before the first token.
        inputs: `k`; `u`, which is added to the key of the current token; `v`; `g`, the log of the
            decay; `one`, 1 for a token and 0 for padding.
        begun: see `Step`.
    """
    k, u, v, g, one = (inputs[name] for name in ("k", "u", "v", "g", "one"))
    undecayed = jnp.zeros_like(g)
    if begun is not None:
        starts = jnp.diff(begun, axis=1, prepend=0)[..., None] > 0
        g, undecayed = (jnp.where(starts, _NOTHING, x) for x in (g, undecayed))
    tokens = WeightedSums(one * v, one, jnp.where(one > 0, k, _NOTHING), g)
    max_exponent = jnp.where(state["d"] > 0, state["m"], _NOTHING)
    initial_sums = WeightedSums(state["n"], state["d"], max_exponent, jnp.zeros_like(max_exponent))
    # Index 0 is the previous state; index t + 1 is the state after token t.
    all_sums = jax.tree.map(
        lambda a, b: jnp.concatenate([a[:, None], b], axis=1), initial_sums, tokens
    )
    prefix_sums = jax.lax.associative_scan(
        lambda previous_sums, right: previous_sums.then(right), all_sums, axis=1
    )
    last = {name: getattr(prefix_sums, name)[:, -1] for name in ("n", "d", "m")}
    seen = WeightedSums(*(x[:, :-1] for x in prefix_sums))
    # A token reads the previous state without decay; the first token of a sequence reads nothing.
    now = seen.then(WeightedSums(v, jnp.ones_like(v), k + u, undecayed))
    return last, now.n / now.d


def shift_tokens(
    x: Float[Array, "b s d"], state: Float[Array, "m 1 d"], rows: Rows
) -> tuple[Float[Array, "b s d"], Float[Array, "m 1 d"]]:
    """Return the previous token of each token, zeros before the first; and the state after this
    step."""
    inputs, state = rows.prepend_history(rows.mask_padding(rows.enter(x)), state)
    previous_x = inputs[:, :-1]
    if rows.starts is not None:
        previous_x = jnp.where(rows.starts[..., None], 0, previous_x)
    return rows.leave(previous_x), state


class Mixed(nnx.Module):
    """Linear layers whose inputs are mixtures of a token and the previous token.

    Args:
        parts: initializers and dtypes.
        names: names of the mixtures: `time_mix_<name>` is the share of the token for each channel.
    """

    def __init__(self, parts: Parts, *names: str):
        d = parts.config.hidden_size
        for name in names:
            half = jnp.full((1, 1, d), 0.5, parts.param_dtype)
            setattr(self, f"time_mix_{name}", nnx.Param(half, axes=(None, None, None)))

    def project_mixture(
        self, name: str, x: jax.Array, previous_x: jax.Array, ctx: Ctx
    ) -> Float[Array, "b s f"]:
        """Return the output of the layer with this name, for its mixture."""
        share = getattr(self, f"time_mix_{name}").get_value().astype(x.dtype)
        mixture = x * share + previous_x * (1 - share)
        return getattr(self, name)(mixture, ctx)


class TimeMixing(Mixed):
    """The attention layer of RWKV. Its states are `n`, `d`, `m` and `attention_x`.

    Args:
        parts: creates the projections.
        width: f.
    """

    def __init__(self, parts: Parts, width: int):
        super().__init__(parts, "key", "value", "receptance")
        d = parts.config.hidden_size
        for name in ("key", "value", "receptance"):
            setattr(self, name, parts.linear(d, width, axes=("embed", "mlp")))
        self.output = parts.linear(width, d, axes=("mlp", "embed"))
        # The host computes the numbers, so they have the same bits on every mesh.
        decay = jnp.asarray(np.linspace(-5.0, 3.0, width), parts.param_dtype)
        self.time_decay = nnx.Param(decay, axes=("mlp",))
        self.time_first = nnx.Param(jnp.zeros((width,), parts.param_dtype), axes=("mlp",))
        last = StateSpec("attention_x", (1, d), jnp.dtype(parts.dtype).name)
        self.states = (*(StateSpec(name, (width,)) for name in "ndm"), last)

    def __call__(
        self, x: Float[Array, "b s d"], states: States, rows: Rows
    ) -> tuple[Float[Array, "b s d"], States]:
        """Return the output of the layer, and the states after this step."""
        ctx = rows.ctx
        previous_x, last = shift_tokens(x, states["attention_x"], rows)

        def enter_mixture(name: str) -> jax.Array:
            return rows.enter(self.project_mixture(name, x, previous_x, ctx), "mlp").astype(
                jnp.float32
            )

        k, v = enter_mixture("key"), enter_mixture("value")
        decay = -jnp.exp(self.time_decay.get_value().astype(jnp.float32))
        first = self.time_first.get_value().astype(jnp.float32)
        inputs = {
            "k": k,
            "u": jnp.broadcast_to(first, k.shape),
            "v": v,
            "g": rows.mask_padding(jnp.broadcast_to(decay, k.shape)),
            "one": rows.mask_padding(jnp.ones_like(k)),
        }
        y, sums = rows.scan(time_mixing, {name: states[name] for name in "ndm"}, inputs)
        receptance = ctx.name_activation(
            self.project_mixture("receptance", x, previous_x, ctx), "attn_receptance"
        )
        y = jax.nn.sigmoid(receptance) * rows.leave(y).astype(x.dtype)
        y = self.output(ctx.name_activation(y, "attn_output"), ctx)
        return ctx.name_activation(y, "attn_dense"), {**sums, "attention_x": last}


class ChannelMixing(Mixed):
    """The feed-forward layer of RWKV. Its state is `feed_forward_x`.

    Args:
        parts: creates the projections.
        width: width of the hidden layer.
    """

    def __init__(self, parts: Parts, width: int):
        super().__init__(parts, "key", "receptance")
        d = parts.config.hidden_size
        self.key = parts.linear(d, width, axes=("embed", "mlp"))
        self.receptance = parts.linear(d, d, axes=("embed", None))
        self.value = parts.linear(width, d, axes=("mlp", "embed"))
        self.states = (StateSpec("feed_forward_x", (1, d), jnp.dtype(parts.dtype).name),)

    def __call__(
        self, x: Float[Array, "b s d"], states: States, rows: Rows
    ) -> tuple[Float[Array, "b s d"], States]:
        """Return the output of the layer, and the state after this step."""
        ctx = rows.ctx
        previous_x, last = shift_tokens(x, states["feed_forward_x"], rows)
        key = ctx.name_activation(self.project_mixture("key", x, previous_x, ctx), "mlp_up")
        value = ctx.name_activation(self.value(jnp.square(jax.nn.relu(key)), ctx), "mlp_down")
        out = jax.nn.sigmoid(self.project_mixture("receptance", x, previous_x, ctx)) * value
        return ctx.name_activation(out, "mlp_output"), {"feed_forward_x": last}
