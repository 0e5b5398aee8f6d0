"""Sampling on the device. The tokens of a request never depend on the other rows.

Each row has a key derived from seed and position, and the key determines the noise of each token.
The sampled token is thus the same for a few candidates and for the whole vocabulary (Gumbel-max,
https://arxiv.org/abs/1611.01144). The step selects between the two at run time from the options of
its rows: sorting a vocabulary costs a hundred times more than finding its maximum.

Legend: n rows, v vocabulary, c candidates, l alternatives (`max_logprobs`), a rows of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_models.generation.sampling import first_argmax, in_nucleus, penalize_repetition
from jaxtyping import Array, Bool, Float, Int

from ed_esurge.runner.filters import among_best, kept_of_filters, within_surprise

# Rows with filters (top-k, top-p, min-p) use this number of most probable tokens, and the whole
# vocabulary only if the filters keep more tokens.
CANDIDATES = 128


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
    typical_p: Float[Array, " n"]
    top_n_sigma: Float[Array, " n"]
    xtc_probability: Float[Array, " n"]
    xtc_threshold: Float[Array, " n"]
    mirostat: Int[Array, " n"]
    mirostat_tau: Float[Array, " n"]
    mirostat_eta: Float[Array, " n"]

    @property
    def special(self) -> Bool[Array, " n"]:
        """Whether a row has a filter of `ed_esurge.runner.filters`."""
        chosen = (self.typical_p < 1) | (self.top_n_sigma > 0) | (self.xtc_probability > 0)
        return (chosen | (self.mirostat > 0)) & (self.temperature > 0)


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
        bias, seen = jnp.zeros((rows, vocab), jnp.float32), jnp.zeros((rows, vocab), jnp.int32)
        return cls(bias, seen, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32))

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

    def read(self, token_ids: Int[Array, " n"], slots: Int[Array, " n"]) -> Int[Array, " n"]:
        """Replace unread tokens (-1) by the last sampled tokens. Each row is one sequence."""
        last = jnp.maximum(self.last.at[slots].get(mode="clip"), 0)  # -1 where logits were NaN
        return jnp.where(token_ids < 0, last, token_ids)

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


def sample(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    state: SamplerState,
    max_logprobs: int,
    allowed: Int[Array, "n w"] | None = None,
) -> tuple[SampledTokens, SamplerState]:
    """Sample a token per row and add the token to the counts of the state.

    Args:
        logits: logits of the model.
        rows: sampling options.
        state: sampling state.
        max_logprobs: number of alternatives l.
        allowed: bit mask of the allowed tokens, 32 bits per number; None = all tokens.
    """
    logits = logits.astype(jnp.float32)
    has_row = rows.slot < state.bias.shape[0]
    adjusted = jax.lax.cond(jnp.any(has_row), lambda: adjust(logits, rows, state), lambda: logits)
    if allowed is not None:
        limited = jnp.any(allowed != -1)
        adjusted = jax.lax.cond(limited, lambda: permit(adjusted, allowed), lambda: adjusted)
    greedy = first_argmax(adjusted)
    random = rows.temperature > 0
    everything = jnp.full(greedy.shape, -jnp.inf)
    mu = state.mu.at[rows.slot].get(mode="fill", fill_value=0)

    def drawn() -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens, cutoff, surprise = draw(adjusted, rows, mu)
        return jnp.where(random, tokens, greedy), jnp.where(random, cutoff, everything), surprise

    tokens, cutoff, surprise = jax.lax.cond(
        jnp.any(random), drawn, lambda: (greedy, everything, jnp.zeros_like(mu))
    )
    n, count = tokens.shape[0], min(max_logprobs, logits.shape[1])

    def measured() -> tuple[jax.Array, ...]:
        def shown() -> jax.Array:
            processed = sampled_from(adjusted, rows, cutoff, tokens)
            return jnp.where(rows.processed[:, None] > 0, processed, logits)

        view = jax.lax.cond(jnp.any(rows.processed > 0), shown, lambda: logits)
        return logprobs_of(view, jax.nn.logsumexp(view, axis=-1), tokens, count)

    def unmeasured() -> tuple[jax.Array, ...]:
        return (
            jnp.zeros(n, jnp.float32),
            jnp.zeros(n, jnp.int32),
            jnp.zeros((n, count), jnp.int32),
            jnp.zeros((n, count), jnp.float32),
        )

    scores = jax.lax.cond(jnp.any(rows.num_logprobs >= 0), measured, unmeasured)
    seen = state.seen.at[rows.slot, tokens].add(2, mode="drop")
    learns = (rows.mirostat > 0) & random
    mu = jnp.where(learns, mu - rows.mirostat_eta * (surprise - rows.mirostat_tau), mu)
    kept = replace(state, seen=seen, mu=state.mu.at[rows.slot].set(mu, mode="drop"))
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    return SampledTokens(jnp.where(finite, tokens, -1), *scores), kept


def adjust(logits: jax.Array, rows: SamplerRows, state: SamplerState) -> jax.Array:
    """Apply penalties, then bias and masks. Rows without a slot are returned unchanged."""
    bias = state.bias.at[rows.slot].get(mode="fill", fill_value=0)
    seen = state.seen.at[rows.slot].get(mode="fill", fill_value=0)
    logits = penalize_repetition(logits, seen > 0, rows.repetition_penalty[:, None])
    count = seen >> 1
    logits = logits - rows.frequency_penalty[:, None] * count
    logits = logits - rows.presence_penalty[:, None] * (count > 0)
    return logits + bias


def permit(logits: Float[Array, "n v"], allowed: Int[Array, "n w"]) -> Float[Array, "n v"]:
    """Set the logits of tokens whose bit is 0 to -inf."""
    bits = (allowed[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(bits.reshape(len(logits), -1)[:, : logits.shape[1]] > 0, logits, -jnp.inf)


def scaled_logits(logits: jax.Array, rows: SamplerRows) -> jax.Array:
    """Divide the logits by the temperature (1 for greedy rows) and subtract the maximum."""
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    return scaled - jnp.max(scaled, axis=-1, keepdims=True)


def sampled_from(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    cutoff: Float[Array, " n"],
    tokens: Int[Array, " n"],
) -> Float[Array, "n v"]:
    """Return logits whose softmax is the distribution that each row samples from.

    Args:
        logits: adjusted logits.
        rows: sampling options.
        cutoff: smallest scaled logit that the row's filters keep.
        tokens: the sampled tokens, which are never removed.
    """
    scaled = scaled_logits(logits, rows)
    every = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    # The scaled logits are computed a second time here, and a compiler may round them differently:
    # the token at the cutoff itself must stay.
    least = cutoff - 1e-5 * (1 + jnp.abs(cutoff))
    kept = (scaled >= least[:, None]) | (every == tokens[:, None])
    return jnp.where(kept, scaled, -jnp.inf)


def draw(
    logits: jax.Array, rows: SamplerRows, mu: Float[Array, " n"]
) -> tuple[Int[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Sample every row with its temperature and filters.

    Args:
        logits: adjusted logits.
        rows: sampling options.
        mu: limits of the surprise of mirostat.

    Returns:
        the tokens, the smallest scaled logit that the filters keep, and the surprise of the tokens
        in bits. The second is -inf for a row without filters, and may be -inf if no row requests
        processed log-probabilities. The third is 0 if no row has mirostat.
    """
    vocab = logits.shape[1]
    random = rows.temperature > 0
    wants_cutoff = jnp.any(rows.processed > 0)
    unfiltered = (rows.top_k == 0) & (rows.top_p >= 1) & (rows.min_p <= 0)
    # The result for greedy rows is not used.
    scaled = scaled_logits(logits, rows)
    odds = jnp.exp(scaled)  # relative to the most probable token
    mass = jnp.sum(odds, axis=-1)
    few, ids = jax.lax.top_k(scaled, min(CANDIDATES, vocab))
    few_odds = jnp.exp(few)
    least = cutoff_of_best(few_odds, mass, rows)
    # Tokens with equal logits are kept or removed together, so the candidates are complete only if
    # the last one is removed. Top-p within a larger top-k needs the sum over the whole top-k.
    sums_known = (rows.top_k <= few.shape[1]) | (rows.top_k >= vocab)
    complete = ((few_odds[:, -1] < least) & sums_known) | (few.shape[1] == vocab)
    complete &= ~rows.special

    def among_candidates() -> tuple[jax.Array, jax.Array, jax.Array]:
        noise = token_noise(rows, ids)
        kept = few_odds >= least[:, None]
        best = first_argmax(jnp.where(kept, few + noise, -jnp.inf))
        cutoff = jnp.min(jnp.where(kept, few, jnp.inf), axis=-1)
        tokens = jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0]
        return tokens, cutoff, jnp.zeros_like(mu)

    def among_all() -> tuple[jax.Array, jax.Array, jax.Array]:
        kept = jax.lax.cond(
            jnp.any(random & ~unfiltered & ~complete & ~rows.special),
            lambda: kept_of_all(odds, mass, rows),
            lambda: jnp.zeros_like(odds, bool),
        )
        kept = jnp.where(complete[:, None], odds >= least[:, None], kept) | unfiltered[:, None]
        kept = jax.lax.cond(
            jnp.any(rows.special),
            lambda: jnp.where(rows.special[:, None], kept_of_special(scaled, rows, mu), kept),
            lambda: kept,
        )
        every = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
        tokens = first_argmax(jnp.where(kept, scaled + token_noise(rows, every), -jnp.inf))
        cutoff = jax.lax.cond(
            wants_cutoff,
            lambda: jnp.min(jnp.where(kept, scaled, jnp.inf), axis=-1),
            lambda: jnp.full(tokens.shape, -jnp.inf),
        )

        def surprise() -> jax.Array:
            total = jnp.sum(jnp.where(kept, odds, 0.0), axis=-1)
            chosen = jnp.take_along_axis(odds, tokens[:, None], axis=1)[:, 0]
            return jnp.log2(total) - jnp.log2(chosen)

        none = jnp.zeros_like(mu)
        return tokens, cutoff, jax.lax.cond(jnp.any(rows.mirostat > 0), surprise, lambda: none)

    enough = (complete & ~unfiltered) | ~random
    return jax.lax.cond(jnp.all(enough), among_candidates, among_all)


def kept_of_special(
    scaled: Float[Array, "n v"], rows: SamplerRows, mu: Float[Array, " n"]
) -> Bool[Array, "n v"]:
    """Return a mask of the tokens that the filters of rows with special filters keep.

    Mirostat replaces all other filters, as in llama.cpp.
    """
    words = jnp.full((len(mu), 1), jnp.iinfo(jnp.int32).max)  # no id of a token
    chance = jnp.exp(-jnp.exp(-token_noise(rows, words)[:, 0]))  # uniform in (0, 1)
    kept = kept_of_filters(
        scaled,
        width=rows.top_n_sigma,
        best=lambda odds: among_best(odds, rows.top_k) | (rows.top_k == 0)[:, None],
        typical_p=rows.typical_p,
        top_p=rows.top_p,
        min_p=rows.min_p,
        xtc_threshold=rows.xtc_threshold,
        xtc_active=chance < rows.xtc_probability,
    )

    def limited() -> jax.Array:
        within = within_surprise(jnp.exp(scaled), mu, rows.mirostat)
        return jnp.where((rows.mirostat > 0)[:, None], within, kept)

    return jax.lax.cond(jnp.any(rows.mirostat > 0), limited, lambda: kept)


def cutoff_of_best(
    odds: Float[Array, "n c"], mass: Float[Array, " n"], rows: SamplerRows
) -> Float[Array, " n"]:
    """Return the smallest odds that a row's filters keep among the best candidates.

    Args:
        odds: the `c` largest probabilities relative to the row's maximum, in descending order.
        mass: the sum of the odds over the whole vocabulary.
        rows: sampling options.
    """
    count = odds.shape[1]
    rank = jnp.arange(count)
    has_k = rows.top_k > 0
    within = (rank < rows.top_k[:, None]) | ~has_k[:, None]
    # Exclusive prefix sums, and the sum over the top-k. TPUs need HIGHEST for exact products.
    earlier = jnp.asarray(rank[:, None] < rank, odds.dtype)
    before = jnp.dot(odds, earlier, precision=jax.lax.Precision.HIGHEST)
    inside = jnp.where(has_k, jnp.sum(jnp.where(within, odds, 0.0), axis=-1), mass)
    nucleus = (before < (rows.top_p * inside)[:, None]) | (rows.top_p >= 1)[:, None]
    kept = within & nucleus & (odds >= rows.min_p[:, None])
    return jnp.min(jnp.where(kept, odds, jnp.inf), axis=-1)


def kept_of_all(
    odds: Float[Array, "n v"], mass: Float[Array, " n"], rows: SamplerRows
) -> Bool[Array, "n v"]:
    """Return a mask of the tokens that a row's filters keep, from all odds in any order.

    A row without top-k and top-p keeps all tokens that min-p keeps.
    """
    has_k = rows.top_k > 0
    best = among_best(odds, rows.top_k) | ~has_k[:, None]
    inside = jnp.where(has_k, jnp.sum(jnp.where(best, odds, 0.0), axis=-1), mass)
    nucleus = in_nucleus(jnp.where(best, odds, 0.0), (rows.top_p * inside)[:, None])
    nucleus |= (rows.top_p >= 1)[:, None]
    return best & nucleus & (odds >= rows.min_p[:, None])


def token_noise(rows: SamplerRows, token_ids: Int[Array, "n c"]) -> Float[Array, "n c"]:
    """Return standard Gumbel noise of tokens, a function of seed, position and token id only.

    The generator is always Threefry, independent of jax's default.
    """

    def of_row(seed: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
        words = jnp.stack([seed, position])
        data = jax.lax.bitcast_convert_type(words, jnp.uint32)
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.key_data(jax.vmap(partial(jax.random.fold_in, key))(ids))[:, 0]

    bits = jax.vmap(of_row)(rows.seed, rows.position, token_ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def logprobs_of(
    logits: Float[Array, "n v"], logz: Float[Array, " n"], tokens: Int[Array, " n"], count: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return `(logprob [n], rank [n], top_ids [n, l], top_logprobs [n, l])` of the tokens."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top, ids = jax.lax.top_k(logits, count)
    return chosen[:, 0] - logz, rank, ids, top - logz[:, None]
