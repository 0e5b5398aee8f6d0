"""Attention with decay, one chunk of tokens at a time, for linear attention and delta rules.

A head has a state `S` [k, v]. Token t multiplies the state by the decay and adds `k[t] u[t]^T`; the
output is `S^T q[t]`:

    S[t] = exp(g[t]) S[t - 1] + k[t] u[t]^T

Within a chunk, this is a sum over pairs of tokens. The state before the chunk contributes to the
tokens until a sequence begins. The decay is one number of a head (g [.., 1]), or one number of each
channel of its key (g [.., k]). All arrays are float32.

Legend: q rows, c tokens (i a reading token, j a writing token), h heads, k key channels, v values.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ed_layers.recurrence.rows import reach

_EXACT = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class Decay:
    """The decays of one chunk.

    Attributes:
        at: log of the decay at a token since the begin of the chunk, or of the token's sequence,
            [q, c, h, 1 or k].
        reach: whether token j contributes to token i, [q or 1, i, j].
        fresh: whether the previous state contributes to a token, [q, c]; None = to all tokens.
    """

    at: Float[Array, "q c h one_or_k"]
    reach: Bool[Array, "q c c"]
    fresh: Bool[Array, "q c"] | None

    @classmethod
    def of(cls, g: Float[Array, "q c h one_or_k"], begun: Int[Array, "q c"] | None) -> Decay:
        """Sum the log decays `g` of a chunk; `begun` as in a `RecurrenceStep`."""
        g = g.astype(jnp.float32)
        reached = reach(begun, g.shape[1])
        if begun is None:
            return cls(g if g.shape[1] == 1 else jnp.cumsum(g, axis=1), reached, None)
        # A product instead of a cumulative sum: other sequences cause no rounding errors.
        at = jnp.einsum("qij,qjhk->qihk", reached.astype(g.dtype), g, precision=_EXACT)
        return cls(at, reached, begun == 0)

    def scores(
        self, a: Float[Array, "q c h k"], b: Float[Array, "q c h k"]
    ) -> Float[Array, "q h c c"]:
        """Return `sum_k a[i] b[j] exp(at[i] - at[j])` where j reaches i, otherwise 0; [q, h,
        i, j]."""
        if self.at.shape[-1] == 1:
            at = jnp.moveaxis(self.at[..., 0], 1, 2)
            exponents = jnp.where(
                self.reach[:, None], at[..., :, None] - at[..., None, :], -jnp.inf
            )
            return jnp.einsum("qihk,qjhk->qhij", a, b, precision=_EXACT) * jnp.exp(exponents)
        # The exponent belongs to each pair: factors of i and j alone would overflow.
        exponents = jnp.where(
            self.reach[..., None, None], self.at[:, :, None] - self.at[:, None], -jnp.inf
        )
        pairs = jnp.sum(a[:, :, None] * b[:, None] * jnp.exp(exponents), axis=-1)
        return jnp.moveaxis(pairs, 3, 1)

    def read(
        self, a: Float[Array, "q c h k"], state: Float[Array, "q h k v"]
    ) -> Float[Array, "q c h v"]:
        """Return the part of the outputs that comes from the state before the chunk."""
        seen = jnp.exp(self.at)
        if self.fresh is not None:
            seen = jnp.where(self.fresh[..., None, None], seen, 0)
        return jnp.einsum("qihk,qhkv->qihv", a * seen, state, precision=_EXACT)

    def attend(
        self,
        a: Float[Array, "q c h k"],
        b: Float[Array, "q c h k"],
        u: Float[Array, "q c h v"],
        state: Float[Array, "q h k v"],
    ) -> Float[Array, "q c h v"]:
        """Return the part of the outputs that comes from the writes `b u^T` of the chunk, including
        the write of the token itself."""
        chunk_output = jnp.einsum("qhij,qjhv->qihv", self.scores(a, b), u, precision=_EXACT)
        return self.read(a, state) + chunk_output

    def write(
        self,
        b: Float[Array, "q c h k"],
        u: Float[Array, "q c h v"],
        state: Float[Array, "q h k v"],
    ) -> Float[Array, "q h k v"]:
        """Return the state after the chunk."""
        end = self.at[:, -1]
        exponents = jnp.where(self.reach[:, -1, :, None, None], end[:, None] - self.at, -jnp.inf)
        state_decay = jnp.exp(end)
        if self.fresh is not None:
            state_decay = jnp.where(self.fresh[:, -1, None, None], state_decay, 0)
        new = jnp.einsum("qjhk,qjhv->qhkv", b * jnp.exp(exponents), u, precision=_EXACT)
        return state_decay[..., None] * state + new
