"""Sampling on the device. The tokens of a request never depend on the other rows.

Each row has a key derived from seed and position, and the key determines the noise of each token.
The sampled token is thus the same for a few candidates and for the whole vocabulary (Gumbel-max,
https://arxiv.org/abs/1611.01144). The step selects between the two at run time from the options of
its rows: sorting a vocabulary costs a hundred times more than finding its maximum.

Legend: n rows, v vocabulary, c candidates, l alternatives (`max_logprobs`), a rows of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_layers.sums import logsumexp
from ed_models.generation.sampling import first_argmax, in_nucleus, penalize_repetition
from jaxtyping import Array, Bool, Float, Int, PyTree

from ed_esurge.runner.row_numbers import (
    DROPPED,
    NO_PROPOSAL,
)
from ed_esurge.runner.sampler_rows import SampledTokens, SamplerRows, SamplerState

# Rows with filters (top-k, top-p, min-p) use this number of most probable tokens, and the whole
# vocabulary only if the filters keep more tokens.
CANDIDATES = 128
# Index of no row: writes to it are dropped.
DROP = 2**30


def read_last(
    last: Int[Array, " a"], token_ids: Int[Array, " n"], slots: Int[Array, " n"]
) -> Int[Array, " n"]:
    """Replace unread tokens (-1) by the last sampled tokens. Each row is one sequence."""
    sampled = jnp.maximum(last.at[slots].get(mode="clip"), 0)  # -1 where logits were NaN
    return jnp.where(token_ids < 0, sampled, token_ids)


def sample(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    state: SamplerState,
    max_logprobs: int,
    allowed: Int[Array, "n w"] | None = None,
) -> tuple[SampledTokens, SamplerState]:
    """Sample a token per row, without masks; see `sample_with_mask`."""
    return sample_with_mask(logits, rows, state, max_logprobs, allowed, masks=False)[:2]


def sample_with_mask(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    state: SamplerState,
    max_logprobs: int,
    allowed: Int[Array, "n w"] | None = None,
    *,
    masks: bool,
    is_switched: bool = False,
) -> tuple[SampledTokens, SamplerState, Int[Array, "n w"] | None]:
    """Sample a token per row and add the token to the counts of the state.

    Args:
        logits: logits of the model.
        rows: sampling options.
        state: sampling state.
        max_logprobs: number of alternatives l.
        allowed: bit mask of the allowed tokens, 32 bits per number; None = all tokens. A row with
            filters of `ed_esurge.runner.filters` has their mask and no other filters.
        masks: whether to return the mask of the tokens that could be sampled.
        is_switched: whether one branch finds the steps without adjusted logits and
            log-probabilities, instead of one branch for each option: a GPU waits for the host at
            each branch.

    Returns:
        the tokens, the state, and bits of the tokens that could be sampled, 32 per number, or None.
    """
    logits = logits.astype(jnp.float32)
    in_one_branch = is_switched and not masks
    get_rows = rows.defer() if in_one_branch else lambda: rows

    def sample_adjusted() -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array, jax.Array | None]:
        rows = get_rows()
        has_row = rows.slot < state.bias.shape[0]
        adjusted = jax.lax.cond(
            jnp.any(has_row), lambda: adjust(logits, rows, state), lambda: logits
        )
        if allowed is not None:
            limited = jnp.any(allowed != -1)
            permit_rows = partial(permit, adjusted, allowed)
            adjusted = jax.lax.cond(limited, permit_rows, lambda: adjusted)
        tokens, cutoff, scores = _choose(logits, adjusted, rows, max_logprobs, cutoffs=masks)
        controlled = jnp.any(rows.mirostat > 0)
        mu = jax.lax.cond(
            controlled, lambda: limits_after(adjusted, rows, state.mu, tokens), lambda: state.mu
        )
        mask = bits(jnp.isfinite(sampled_from(adjusted, rows, cutoff, tokens))) if masks else None
        return tokens, scores, mu, mask

    if in_one_branch:
        is_changed = (rows.slot < state.bias.shape[0]) | (rows.mirostat > 0)
        is_changed |= rows.num_logprobs >= 0
        if allowed is not None:
            is_changed |= jnp.any(allowed != -1, axis=1)
        is_adjusted = jnp.any(is_changed)
        tokens, scores, mu, mask = sample_in_one_branch(
            *(logits, rows, max_logprobs, is_adjusted, (state.mu, None)), sample_adjusted
        )
    else:
        tokens, scores, mu, mask = sample_adjusted()
    marked_tokens = mark_nonfinite_rows(tokens, logits)
    counted_slots = rows.slot
    if rows.proposal is not None:
        marked_tokens = jnp.where(rows.proposal == DROPPED, -1, marked_tokens)
        counted_slots = jnp.where(are_accepted(rows.proposal, marked_tokens), rows.slot, DROP)
    seen = state.seen.at[counted_slots, tokens].add(2, mode="drop")
    new_state = replace(state, seen=seen, mu=mu)
    return SampledTokens(marked_tokens, *scores), new_state, mask


def sample_plain(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    max_logprobs: int,
    *,
    is_switched: bool = False,
) -> SampledTokens:
    """Sample a token per row without adjusted logits. Arguments as for `sample_with_mask`."""
    logits = logits.astype(jnp.float32)

    get_rows = rows.defer() if is_switched else lambda: rows

    def sample_scored() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        tokens, _, scores = _choose(logits, logits, get_rows(), max_logprobs)
        return tokens, scores

    arguments = (logits, rows, max_logprobs, jnp.any(rows.num_logprobs >= 0), (), sample_scored)
    tokens, scores = sample_in_one_branch(*arguments) if is_switched else sample_scored()
    return SampledTokens(mark_nonfinite_rows(tokens, logits), *scores)


def sample_in_one_branch(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    max_logprobs: int,
    needs_more: Bool[Array, ""],
    unchanged: tuple[jax.Array | None, ...],
    sample_more: Callable[[], tuple[PyTree, ...]],
) -> tuple[PyTree, ...]:
    """Return the tokens, the scores, and further results, from one branch of three.

    Args:
        logits: logits of the model, float32.
        rows: sampling options.
        max_logprobs: number of alternatives l.
        needs_more: whether the step needs more than greedy tokens, or samples of the logits.
        unchanged: the further results of a step that needs no more.
        sample_more: returns the results of a step that needs more.
    """
    greedy, get_rows = first_argmax(logits), rows.defer()
    remaining_results = (make_empty_scores(logits, max_logprobs), *unchanged)

    def sample_randomly() -> tuple[PyTree, ...]:
        rows = get_rows()
        tokens = jnp.where(rows.temperature > 0, draw(logits, rows)[0], greedy)
        return tokens, *remaining_results

    branch = jnp.where(needs_more, 2, jnp.any(rows.temperature > 0).astype(jnp.int32))
    return jax.lax.switch(
        branch, [lambda: (greedy, *remaining_results), sample_randomly, sample_more]
    )


def mark_nonfinite_rows(tokens: Int[Array, " n"], logits: Float[Array, "n v"]) -> Int[Array, " n"]:
    """Return the tokens, or -1 where a logit of the row is NaN or all are infinite."""
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, -1)


def _choose(
    logits: Float[Array, "n v"],
    adjusted: Float[Array, "n v"],
    rows: SamplerRows,
    max_logprobs: int,
    *,
    cutoffs: bool = False,
) -> tuple[Int[Array, " n"], Float[Array, " n"], tuple[jax.Array, ...]]:
    """Sample a token per row and measure its log-probability.

    Args:
        logits: logits of the model.
        adjusted: logits with penalties, biases and masks.
        rows: sampling options.
        max_logprobs: number of alternatives l.
        cutoffs: see `draw`.

    Returns:
        the tokens, the smallest logit that the filters keep, and the other fields of
        `SampledTokens`.
    """
    greedy = first_argmax(adjusted)
    random = rows.temperature > 0
    everything = jnp.full(greedy.shape, -jnp.inf)

    def draw_tokens() -> tuple[jax.Array, jax.Array]:
        tokens, cutoff = draw(adjusted, rows, cutoffs=cutoffs)
        return jnp.where(random, tokens, greedy), jnp.where(random, cutoff, everything)

    tokens, cutoff = jax.lax.cond(jnp.any(random), draw_tokens, lambda: (greedy, everything))
    count = min(max_logprobs, logits.shape[1])

    def compute_scores() -> tuple[jax.Array, ...]:
        def select_logits() -> jax.Array:
            processed = sampled_from(adjusted, rows, cutoff, tokens)
            return jnp.where(rows.processed[:, None] > 0, processed, logits)

        view = jax.lax.cond(jnp.any(rows.processed > 0), select_logits, lambda: logits)
        return compute_logprobs(view, logsumexp(view), tokens, count)

    make_empty = partial(make_empty_scores, logits, max_logprobs)
    scores = jax.lax.cond(jnp.any(rows.num_logprobs >= 0), compute_scores, make_empty)
    return tokens, cutoff, scores


def make_empty_scores(logits: Float[Array, "n v"], max_logprobs: int) -> tuple[jax.Array, ...]:
    """Return the scores of `SampledTokens` for a step without log-probabilities."""
    n, count = logits.shape[0], min(max_logprobs, logits.shape[1])
    numbers, ranks = jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32)
    ids, logprobs = jnp.zeros((n, count), jnp.int32), jnp.zeros((n, count), jnp.float32)
    return numbers, ranks, ids, logprobs


def limits_after(
    logits: Float[Array, "n v"],
    rows: SamplerRows,
    mu: Float[Array, " a"],
    tokens: Int[Array, " n"],
) -> Float[Array, " a"]:
    """Return the limits of mirostat after the sampled tokens (https://arxiv.org/abs/2007.14966).

    Args:
        logits: adjusted logits, -inf for the tokens that mirostat removes.
        rows: sampling options.
        mu: the limits before.
        tokens: the sampled tokens.
    """
    logs = jax.nn.log_softmax(scaled_logits(logits, rows), axis=-1)
    surprise = -jnp.take_along_axis(logs, tokens[:, None], axis=1)[:, 0] / math.log(2)
    learns = (rows.mirostat > 0) & (rows.temperature > 0)
    step = jnp.where(learns, rows.mirostat_eta * (surprise - rows.mirostat_tau), 0.0)
    return mu.at[rows.slot].add(-step, mode="drop")


def adjust(logits: jax.Array, rows: SamplerRows, state: SamplerState) -> jax.Array:
    """Apply penalties, then bias and masks. Rows without a slot are returned unchanged."""
    bias = state.bias.at[rows.slot].get(mode="fill", fill_value=0)
    seen = state.seen.at[rows.slot].get(mode="fill", fill_value=0)
    if (proposal := rows.proposal) is not None:
        is_drafted = jnp.any((proposal >= 0) & (rows.slot < state.bias.shape[0]))
        seen = jax.lax.cond(
            is_drafted, lambda seen: count_proposals(seen, proposal), lambda seen: seen, seen
        )
    logits = penalize_repetition(logits, seen > 0, rows.repetition_penalty[:, None])
    count = seen >> 1
    logits = logits - rows.frequency_penalty[:, None] * count
    logits = logits - rows.presence_penalty[:, None] * (count > 0)
    return logits + bias


def precedes(proposal: Int[Array, " n"]) -> Bool[Array, "n n"]:
    """Return whether the second row is a proposal of the sequence of the first row, at the same
    place or before."""
    index = jnp.arange(len(proposal))
    is_proposal = proposal != NO_PROPOSAL
    first = jax.lax.cummax(jnp.where(is_proposal, 0, index))
    before = (index <= index[:, None]) & (first == first[:, None])
    return before & is_proposal


def count_proposals(seen: Int[Array, "n v"], proposal: Int[Array, " n"]) -> Int[Array, "n v"]:
    """Return the counts of each row with the proposals of its sequence up to the row."""
    rows = jnp.arange(len(proposal))[:, None]
    return seen.at[rows, jnp.maximum(proposal, 0)].add(2 * precedes(proposal))


def are_accepted(proposal: Int[Array, " n"], tokens: Int[Array, " n"]) -> Bool[Array, " n"]:
    """Return whether the sequence of each row receives the token that the row sampled: each
    proposal up to the row equals the token that the row before sampled.

    Args:
        proposal: see `SamplerRows`.
        tokens: sampled tokens; -1 = none.
    """
    equal = (proposal == jnp.roll(tokens, 1)) & (tokens >= 0)
    return jnp.all(equal | ~precedes(proposal), axis=1)


def permit(logits: Float[Array, "n v"], allowed: Int[Array, "n w"]) -> Float[Array, "n v"]:
    """Set the logits of tokens whose bit is 0 to -inf."""
    bits = (allowed[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(bits.reshape(len(logits), -1)[:, : logits.shape[1]] > 0, logits, -jnp.inf)


def bits(token_mask: Bool[Array, "n v"]) -> Int[Array, "n w"]:
    """Return a mask of tokens as bits, 32 per number."""
    padded = jnp.pad(token_mask, ((0, 0), (0, -token_mask.shape[1] % 32))).reshape(
        len(token_mask), -1, 32
    )
    numbers = jnp.sum(padded.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=-1)
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.uint32), jnp.int32)


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
        cutoff: smallest logit that the row's filters keep.
        tokens: the sampled tokens, which are never removed.
    """
    scaled = scaled_logits(logits, rows)
    every = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    # A compiler may compute the logits a second time here, and change their last bit: the token at
    # the cutoff itself must stay.
    least = cutoff - 2.0**-22 * jnp.abs(cutoff)
    keep_mask = (logits >= least[:, None]) | (every == tokens[:, None])
    return jnp.where(keep_mask, scaled, -jnp.inf)


def draw(
    logits: jax.Array, rows: SamplerRows, *, cutoffs: bool = False
) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """Sample every row with its temperature and filters.

    Args:
        logits: adjusted logits.
        rows: sampling options.
        cutoffs: whether the caller needs the smallest logits in every case.

    Returns:
        the tokens, and the smallest logit that the filters keep. The latter is -inf for a
        row without filters, and may be -inf if no row requests processed log-probabilities and
        `cutoffs` is False.
    """
    vocab = logits.shape[1]
    random = rows.temperature > 0
    wants_cutoff = jnp.any(rows.processed > 0) | cutoffs
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

    def among_candidates() -> tuple[jax.Array, jax.Array]:
        noise = token_noise(rows, ids)
        keep_mask = few_odds >= least[:, None]
        best = first_argmax(jnp.where(keep_mask, few + noise, -jnp.inf))
        candidate_logits = jnp.take_along_axis(logits, ids, axis=1)
        cutoff = jnp.min(jnp.where(keep_mask, candidate_logits, jnp.inf), axis=-1)
        tokens = jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0]
        return tokens, cutoff

    def among_all() -> tuple[jax.Array, jax.Array]:
        keep_mask = jax.lax.cond(
            jnp.any(random & ~unfiltered & ~complete),
            lambda: kept_of_all(odds, mass, rows),
            lambda: jnp.zeros_like(odds, bool),
        )
        keep_mask = (
            jnp.where(complete[:, None], odds >= least[:, None], keep_mask) | unfiltered[:, None]
        )
        every = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
        tokens = first_argmax(jnp.where(keep_mask, scaled + token_noise(rows, every), -jnp.inf))
        cutoff = jax.lax.cond(
            wants_cutoff,
            lambda: jnp.min(jnp.where(keep_mask, logits, jnp.inf), axis=-1),
            lambda: jnp.full(tokens.shape, -jnp.inf),
        )
        return tokens, cutoff

    enough = (complete & ~unfiltered) | ~random
    return jax.lax.cond(jnp.all(enough), among_candidates, among_all)


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
    preceding_mass = jnp.dot(odds, earlier, precision=jax.lax.Precision.HIGHEST)
    inside = jnp.where(has_k, jnp.sum(jnp.where(within, odds, 0.0), axis=-1), mass)
    nucleus = (preceding_mass < (rows.top_p * inside)[:, None]) | (rows.top_p >= 1)[:, None]
    keep_mask = within & nucleus & (odds >= rows.min_p[:, None])
    return jnp.min(jnp.where(keep_mask, odds, jnp.inf), axis=-1)


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


def among_best(odds: Float[Array, "n v"], top_k: Int[Array, " n"]) -> Bool[Array, "n v"]:
    """Return a mask of the `top_k` largest odds of each row, including ties with the smallest.

    The smallest is found by bisection over the bits of float32, since non-negative floats have the
    same order as their bits. The result is exact, in an eighth of the time of a sort on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(odds, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at least top_k values are >= low, fewer than top_k are > high
        middle = low + (high - low + 1) // 2
        enough = jnp.sum(bits >= middle[:, None], axis=-1) >= top_k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    start = jnp.zeros_like(top_k), jnp.max(bits, axis=-1)
    least, _ = jax.lax.fori_loop(0, 31, halve, start)
    return bits >= least[:, None]


def token_noise(rows: SamplerRows, token_ids: Int[Array, "n c"]) -> Float[Array, "n c"]:
    """Return standard Gumbel noise of tokens, a function of seed, position and token id only.

    The generator is always Threefry, independent of jax's default.
    """

    def draw_bits(seed: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
        words = jnp.stack([seed, position])
        data = jax.lax.bitcast_convert_type(words, jnp.uint32)
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.key_data(jax.vmap(partial(jax.random.fold_in, key))(ids))[:, 0]

    bits = jax.vmap(draw_bits)(rows.seed, rows.position, token_ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def compute_logprobs(
    logits: Float[Array, "n v"], logz: Float[Array, " n"], tokens: Int[Array, " n"], count: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return `(logprob [n], rank [n], top_ids [n, l], top_logprobs [n, l])` of the tokens."""
    token_logits = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > token_logits, axis=-1, dtype=jnp.int32)
    top, ids = jax.lax.top_k(logits, count)
    return token_logits[:, 0] - logz, rank, ids, top - logz[:, None]
