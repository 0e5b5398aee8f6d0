"""The arrays of the sampler: options of the rows, state between steps, and sampled tokens.

Legend: n rows, v vocabulary, l alternatives (`max_logprobs`), a rows of the state, k numbers
of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_layers.cache.storage import zeros
from jaxtyping import Array, Float, Int

from ed_esurge.runner.row_numbers import OF_SAMPLING, OF_STEP, split_columns


@dataclass(frozen=True)
class SamplerRows:
    """Sampling options of each row; all fields have shape [n].

    Attributes:
        slot: row of the `SamplerState`; out of range for a row without adjustments.
        seed: bits of the request's 32-bit seed.
        position: index of the token to be sampled in its sequence.
        temperature: sampling temperature; 0 = greedy.
        top_k: number of most probable tokens to keep; 0 = all.
        num_logprobs: number of alternatives; -1 = no log-probabilities.
        processed: 1 for log-probabilities of the distribution that the row samples from, 0 for
            those of the model.
        mirostat: version of mirostat; 0 = off. Its filter is part of `allowed`.
        proposal: the proposed token that the row verifies: the token before the sampled one.
            `NO_PROPOSAL`: a known token. `DROPPED`: the sampled token is not used. The rows of a
            sequence are consecutive.
    """

    slot: Int[Array, " n"]
    seed: Int[Array, " n"]
    position: Int[Array, " n"]
    top_k: Int[Array, " n"]
    num_logprobs: Int[Array, " n"]
    processed: Int[Array, " n"]
    temperature: Float[Array, " n"]
    top_p: Float[Array, " n"]
    min_p: Float[Array, " n"]
    presence_penalty: Float[Array, " n"]
    frequency_penalty: Float[Array, " n"]
    repetition_penalty: Float[Array, " n"]
    mirostat: Int[Array, " n"]
    mirostat_tau: Float[Array, " n"]
    mirostat_eta: Float[Array, " n"]
    proposal: Int[Array, " n"] | None = None

    @classmethod
    def of(cls, numbers: Int[Array, "k n"]) -> SamplerRows:
        """Return the rows of the numbers of a step, by `OF_STEP`."""
        named = split_columns(numbers, OF_STEP)
        options = {name: named[name] for name in OF_SAMPLING}
        return cls(position=named["kv_lens"], proposal=named["proposals"], **options)

    def defer(self) -> Callable[[], SamplerRows]:
        """Return a function that returns equal rows from one array.

        A GPU copies each array that a branch reads before the branch, also if it is not taken.
        """
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        numbers = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays.values()]
        # Without the barrier, the compiler passes the single arrays to the branches again.
        stacked = jax.lax.optimization_barrier(jnp.stack(numbers))

        def split_rows() -> SamplerRows:
            lines = zip(arrays.items(), stacked, strict=True)
            return SamplerRows(
                **{
                    name: jax.lax.bitcast_convert_type(line, array.dtype)
                    for (name, array), line in lines
                }
            )

        return split_rows


_STATE = ["bias", "seen", "last", "mu"]


@partial(jax.tree_util.register_dataclass, data_fields=_STATE, meta_fields=[])
@dataclass(frozen=True)
class SamplerState:
    """Sampling state between steps, stored on the device and donated in each step.

    Attributes:
        bias: term added to the logits: biases, and -inf for masked tokens; [a, v].
        seen: `2 * (times generated) + (in the prompt)`; [a, v].
        last: the token that each slot sampled last; [a].
        mu: limit of the surprise of mirostat, in bits; [a].
    """

    bias: Float[Array, "a v"]
    seen: Int[Array, "a v"]
    last: Int[Array, " a"]
    mu: Float[Array, " a"]

    @classmethod
    def create(cls, rows: int, vocab: int) -> SamplerState:
        bias, seen = zeros((rows, vocab), jnp.float32), zeros((rows, vocab), jnp.int32)
        return cls(bias, seen, zeros((rows,), jnp.int32), zeros((rows,), jnp.float32))

    def put(
        self, slot: jax.Array, bias: jax.Array, seen: jax.Array, mu: jax.Array | float = math.nan
    ) -> SamplerState:
        """Return the state with one row of `bias` and `seen` replaced; also `mu`, unless NaN."""
        mu = jnp.where(jnp.isnan(mu), self.mu[slot], mu)
        return replace(
            self,
            bias=self.bias.at[slot].set(bias),
            seen=self.seen.at[slot].set(seen),
            mu=self.mu.at[slot].set(mu),
        )

    def note(self, slots: Int[Array, " n"], tokens: Int[Array, " n"]) -> SamplerState:
        """Return the state with the sampled tokens as `last`."""
        return replace(self, last=self.last.at[slots].set(tokens, mode="drop"))


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens and log-probabilities of a step.

    Attributes:
        tokens: sampled tokens [n]; -1 where a logit of the row is NaN or all are infinite.
        logprob, rank: log-probability and rank of the sampled token [n], see
            `SamplerRows.processed`. Zeros if no row requests log-probabilities.
        top_ids, top_logprobs: the most probable tokens of the same distribution, best first;
            [n, l].
    """

    tokens: Int[Array, " n"]
    logprob: Float[Array, " n"]
    rank: Int[Array, " n"]
    top_ids: Int[Array, "n l"]
    top_logprobs: Float[Array, "n l"]

    def pack(self) -> Int[Array, "n w"]:
        """Return one int32 array for the transfer, floats as their bits; `w = 3 + 2 l`."""
        parts = []
        for field in fields(self):
            x = getattr(self, field.name)
            x = x if x.ndim == 2 else x[:, None]
            if x.dtype == jnp.float32:
                x = jax.lax.bitcast_convert_type(x, jnp.int32)
            parts.append(x)
        return jnp.concatenate(parts, axis=1)
