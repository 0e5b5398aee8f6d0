"""From logits to tokens, on the device. What a request gets never depends on the other rows.

Each row has its own key, `fold_in(key(seed), position)`, and each token its own noise out of that
key, so a token is chosen by the same numbers whether the row looks at a few candidates or at the
whole vocabulary (Gumbel-max, https://arxiv.org/abs/1611.01144). Which of these happens is decided
at run time by what the rows of the batch need: sorting a vocabulary costs a hundred times more
than its maximum.

Legend: n rows, v vocabulary, c candidates, l alternatives (`max_logprobs`), a rows of the state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Rows that filter (top-k, top-p, min-p) look at so many tokens, and at all only if these do not
# hold what the filters leave.
CANDIDATES = 128


@dataclass(frozen=True)
class SamplerRows:
    """How each row samples; all [n].

    Attributes:
        slot: row of the `SamplerState`; out of range for a row without adjustments.
        seed: bits of the request's 32-bit seed.
        position: index of the token to be sampled in its sequence.
        temperature: 0 is greedy.
        top_k: 0 is off.
        num_logprobs: alternatives wanted; -1 is no log-probability at all.
    """

    slot: Int[Array, " n"]
    seed: Int[Array, " n"]
    position: Int[Array, " n"]
    top_k: Int[Array, " n"]
    num_logprobs: Int[Array, " n"]
    temperature: Float[Array, " n"]
    top_p: Float[Array, " n"]
    min_p: Float[Array, " n"]
    presence_penalty: Float[Array, " n"]
    frequency_penalty: Float[Array, " n"]
    repetition_penalty: Float[Array, " n"]


@partial(jax.tree_util.register_dataclass, data_fields=["bias", "seen"], meta_fields=[])
@dataclass(frozen=True)
class SamplerState:
    """What adjusts the logits of running requests, kept on the device and donated each step.

    Attributes:
        bias: added to the logits: biases, and -inf for masked tokens; [a, v].
        seen: `2 * (times generated) + (in the prompt)`; [a, v].
    """

    bias: Float[Array, "a v"]
    seen: Int[Array, "a v"]

    @classmethod
    def create(cls, rows: int, vocab: int) -> SamplerState:
        return cls(jnp.zeros((rows, vocab), jnp.float32), jnp.zeros((rows, vocab), jnp.int32))

    def put(self, slot: jax.Array, bias: jax.Array, seen: jax.Array) -> SamplerState:
        """Set one row."""
        return SamplerState(self.bias.at[slot].set(bias), self.seen.at[slot].set(seen))


@dataclass(frozen=True)
class Sampled:
    """What a step gives back.

    Attributes:
        tokens: [n].
        logprob, rank: of the chosen token under the model itself; [n]. Zeros when no row asked.
        top_ids, top_logprobs: the most probable tokens, best first; [n, l].
    """

    tokens: Int[Array, " n"]
    logprob: Float[Array, " n"]
    rank: Int[Array, " n"]
    top_ids: Int[Array, "n l"]
    top_logprobs: Float[Array, "n l"]

    def pack(self) -> Int[Array, "n w"]:
        """One array to read back, floats by their bits; `w = 3 + 2 l`."""
        parts = []
        for field in fields(self):
            x = getattr(self, field.name)
            x = x if x.ndim == 2 else x[:, None]
            if x.dtype == jnp.float32:
                x = jax.lax.bitcast_convert_type(x, jnp.int32)
            parts.append(x)
        return jnp.concatenate(parts, axis=1)


def sample(
    logits: Float[Array, "n v"], rows: SamplerRows, state: SamplerState, max_logprobs: int
) -> tuple[Sampled, SamplerState]:
    """Choose a token per row, and count it in the state."""
    logits = logits.astype(jnp.float32)
    has_row = rows.slot < state.bias.shape[0]
    adjusted = jax.lax.cond(jnp.any(has_row), lambda: adjust(logits, rows, state), lambda: logits)
    greedy = first_max(adjusted)
    random = rows.temperature > 0
    tokens = jax.lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, draw(adjusted, rows), greedy),
        lambda: greedy,
    )
    n, count = tokens.shape[0], min(max_logprobs, logits.shape[1])

    def measured() -> tuple[jax.Array, ...]:
        return logprobs_of(logits, jax.nn.logsumexp(logits, axis=-1), tokens, count)

    def unmeasured() -> tuple[jax.Array, ...]:
        return (
            jnp.zeros(n, jnp.float32),
            jnp.zeros(n, jnp.int32),
            jnp.zeros((n, count), jnp.int32),
            jnp.zeros((n, count), jnp.float32),
        )

    found = jax.lax.cond(jnp.any(rows.num_logprobs >= 0), measured, unmeasured)
    seen = state.seen.at[rows.slot, tokens].add(2, mode="drop")
    return Sampled(tokens, *found), SamplerState(state.bias, seen)


def adjust(logits: jax.Array, rows: SamplerRows, state: SamplerState) -> jax.Array:
    """Penalties, then bias and masks. Rows without a slot are returned as they are."""
    bias = state.bias.at[rows.slot].get(mode="fill", fill_value=0)
    seen = state.seen.at[rows.slot].get(mode="fill", fill_value=0)
    repetition = jnp.where(seen > 0, rows.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    count = seen >> 1
    logits = logits - rows.frequency_penalty[:, None] * count
    logits = logits - rows.presence_penalty[:, None] * (count > 0)
    return logits + bias


def first_max(x: Float[Array, "n v"]) -> Int[Array, " n"]:
    """Index of the maximum, the first of equals. (XLA's argmax is five times slower on a CPU.)"""
    top = jnp.max(x, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    found = jnp.min(jnp.where(x == top, index, x.shape[1]), axis=-1)
    return jnp.minimum(found, x.shape[1] - 1)  # NaN equals nothing


def draw(logits: jax.Array, rows: SamplerRows) -> Int[Array, " n"]:
    """Sample every row at its temperature, within its filters."""
    vocab = logits.shape[1]
    # Greedy rows come along at temperature 1; their result is not used.
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    keys = jax.vmap(row_key)(rows.seed, rows.position)
    unfiltered = (rows.top_k == 0) & (rows.top_p >= 1) & (rows.min_p <= 0)
    values, ids = jax.lax.top_k(scaled, min(CANDIDATES, vocab))
    logz = jax.nn.logsumexp(scaled, axis=-1)
    lowest = threshold(values, rows, logz, vocab)
    # Equal logits are kept or dropped together, so the last candidate must lie below the threshold;
    # and top-p within a larger top-k needs the sum over all of that.
    sums_known = (rows.top_k <= values.shape[1]) | (rows.top_k >= vocab)
    complete = ((values[:, -1] < lowest) & sums_known) | (values.shape[1] == vocab)
    random = rows.temperature > 0

    def among_candidates() -> jax.Array:
        noise = jax.vmap(token_noise)(keys, ids)
        best = first_max(jnp.where(values >= lowest[:, None], values + noise, -jnp.inf))
        return jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0]

    def among_all() -> jax.Array:
        bounds = jax.lax.cond(
            jnp.any(random & ~unfiltered & ~complete),
            lambda: threshold(-jnp.sort(-scaled, axis=-1), rows, logz, vocab),
            lambda: lowest,
        )
        bounds = jnp.where(complete, lowest, bounds)
        bounds = jnp.where(unfiltered, -jnp.inf, bounds)[:, None]
        every = jnp.arange(vocab, dtype=jnp.int32)
        noise = jax.vmap(token_noise, in_axes=(0, None))(keys, every)
        return first_max(jnp.where(scaled >= bounds, scaled + noise, -jnp.inf))

    enough = complete & ~unfiltered
    return jax.lax.cond(jnp.all(enough | ~random), among_candidates, among_all)


def threshold(
    values: Float[Array, "n c"], rows: SamplerRows, logz: Float[Array, " n"], vocab: int
) -> Float[Array, " n"]:
    """The smallest logit that the filters leave, from the largest `c` logits, descending.

    top-k first; top-p over what it left; min-p relative to the most probable token.
    """
    rank = jnp.arange(values.shape[1])
    limit = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]
    within = jnp.where(rank < limit, values, -jnp.inf)
    total = jnp.where(limit[:, 0] <= values.shape[1], jax.nn.logsumexp(within, axis=-1), logz)
    probability = jnp.exp(within - total[:, None])
    before = jnp.cumsum(probability, axis=-1) - probability
    keep = (rank < limit) & ((before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None])
    floor = values[:, :1] + jnp.log(rows.min_p)[:, None]
    keep &= (values >= floor) | (rank == 0)
    kept = jnp.sum(keep, axis=-1)
    return jnp.take_along_axis(values, kept[:, None] - 1, axis=1)[:, 0]


def row_key(seed: jax.Array, position: jax.Array) -> jax.Array:
    """The key of one token of one request. The generator is fixed, whatever jax's default is."""
    bits = jax.lax.bitcast_convert_type(seed, jnp.uint32)
    return jax.random.fold_in(jax.random.key(bits, impl="threefry2x32"), position)


def token_noise(key: jax.Array, token_ids: Int[Array, " c"]) -> Float[Array, " c"]:
    """Standard Gumbel noise of tokens: a function of key and token id alone."""
    folded = jax.vmap(partial(jax.random.fold_in, key))(token_ids)
    bits = jax.random.key_data(folded)[:, 0]
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def logprobs_of(
    logits: Float[Array, "n v"], logz: Float[Array, " n"], tokens: Int[Array, " n"], count: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(logprob [n], rank [n], top_ids [n, l], top_logprobs [n, l])` of given tokens."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top, ids = jax.lax.top_k(logits, count)
    return chosen[:, 0] - logz, rank, ids, top - logz[:, None]
