"""Functions on logits that `generate` and the engine share: penalties, bans, filters, draws.

Each is pure, and its numbers are one for all rows or `[b, 1]`. `ed_models.generation.processors`
lists the options of `generate` that call them.

Tokens of rows come as `ids` [b, t], right-aligned: the latest token is the last, and positions to
the left of a row's first token is -1.

Legend: b rows, v vocabulary, c candidates, t tokens of a row, m sequences, n tokens of a sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_layers.native import rows
from jaxtyping import Array, Bool, Float, Int, Key


def row_keys(seed: Int[Array, ""] | int, rows: int) -> Key[Array, " b"]:
    """A key for each row: the row folded into the seed, so that seeds share no row."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))


#: Tokens of a block in which `first_argmax` looks closer.
_BLOCK = 128


def first_argmax(logits: Float[Array, "b v"]) -> Int[Array, " b"]:
    """The first index of each row's maximum; on a CPU many times faster than `jnp.argmax`.

    The index of a row with NaN is arbitrary.
    """
    if rows.finds_argmax(logits):
        return rows.find_argmax(logits)
    b, v = logits.shape
    if v % _BLOCK == 0 and v >= _BLOCK**2:
        # A large vocabulary is read once, for the maxima of its blocks.
        parts = logits.reshape(b, -1, _BLOCK)
        tops = jnp.max(parts, axis=-1)
        block = first_argmax(tops)
        inside = jnp.take_along_axis(parts, block[:, None, None], axis=1)[:, 0]
        return block * _BLOCK + first_argmax(inside)
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.minimum(jnp.min(jnp.where(logits == best, index, v), axis=-1), v - 1)


def penalize_repetition(
    logits: Float[Array, "b v"],
    seen: Bool[Array, "b v"],
    factor: Float[Array, "*b_1"] | float,
) -> Float[Array, "b v"]:
    """Make the tokens that a row holds less likely (CTRL, Keskar et al., 2019).

    Positive logits are divided by the factor, negative ones multiplied.

    Args:
        factor: above 1 for less likely, 1 for no change; one number, or [b, 1].
    """
    penalized = jnp.where(logits < 0, logits * factor, logits / factor)
    return jnp.where(seen, penalized, logits)


def likely_enough(
    logits: Float[Array, "b c"], min_p: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark tokens that are at least `min_p` times as likely as the likeliest (Nguyen et al., 2024).

    Args:
        min_p: 0 marks everything; one number, or [b, 1].
    """
    return logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)


def in_nucleus(
    probs: Float[Array, "b c"], top_p: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark the fewest likeliest candidates whose probabilities sum to at least `top_p`.

    A candidate is marked if all likelier tokens together have less than `top_p` (Holtzman et al.,
    2019).

    Args:
        top_p: above 0; one number, or [b, 1].
    """
    # Non-negative floats are ordered as their bits are.
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)
    return _first_to_reach(top_p, probs, jnp.max(bits, axis=-1, keepdims=True) - bits)


def is_typical(
    logits: Float[Array, "b c"], mass: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark the most typical candidates whose probabilities sum to at least `mass`.

    Typical is what surprises about as much as the distribution does on average (Meister et al.,
    2022).

    Args:
        mass: above 0; one number, or [b, 1].
    """
    logprobs = jax.nn.log_softmax(logits)
    distance = jnp.abs(-logprobs - entropy(logprobs))
    order = jax.lax.bitcast_convert_type(distance, jnp.int32)
    return _first_to_reach(mass, jnp.exp(logprobs), order)


def above_epsilon(
    logits: Float[Array, "b c"], epsilon: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark probabilities of at least `epsilon`, and the largest (Hewitt et al., 2022)."""
    best = logits >= jnp.max(logits, axis=-1, keepdims=True)
    return best | (jax.nn.softmax(logits) >= epsilon)


def above_eta(
    logits: Float[Array, "b c"], epsilon: Float[Array, "*b_1"] | float
) -> Bool[Array, "b c"]:
    """Mark probabilities of at least `min(epsilon, sqrt(epsilon) * exp(-entropy))`, and the
    largest: the flatter the distribution, the lower the bar (Hewitt et al., 2022)."""
    bar = jnp.sqrt(epsilon) * jnp.exp(-entropy(jax.nn.log_softmax(logits)))
    return above_epsilon(logits, jnp.minimum(epsilon, bar))


def entropy(logprobs: Float[Array, "b c"]) -> Float[Array, "b 1"]:
    """Return the entropy in nats; impossible tokens add nothing."""
    terms = jnp.where(logprobs > -jnp.inf, jnp.exp(logprobs) * logprobs, 0.0)
    return -jnp.sum(terms, axis=-1, keepdims=True)


def among_largest(scores: Float[Array, "b c"], count: int) -> Bool[Array, "b c"]:
    """Mark the `count` largest, and what equals the least of them."""
    count = min(count, scores.shape[-1])
    return scores >= jax.lax.top_k(scores, count)[0][:, -1:]


def _first_to_reach(
    mass: Float[Array, "*b_1"] | float, probs: Float[Array, "b c"], order: Int[Array, "b c"]
) -> Bool[Array, "b c"]:
    """Mark a candidate if those before it in `order` (0 or more, the least first) weigh less than
    `mass`.

    The last order that is in is found by bisection over 31 bits (exact), which on a CPU costs an
    eighth of a sort of the vocabulary.
    """

    def halve(_, bounds):
        low, high = bounds  # the result is in [low, high]
        middle = high - (high - low) // 2
        mass_below = jnp.sum(jnp.where(order < middle, probs, 0.0), axis=-1, keepdims=True)
        fits = mass_below < mass
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    start = jnp.zeros((probs.shape[0], 1), jnp.int32), jnp.max(order, axis=-1, keepdims=True)
    last, _ = jax.lax.fori_loop(0, 31, halve, start)
    return order <= last


def mark_row_tokens(ids: Int[Array, "b t"], vocab_size: int) -> Bool[Array, "b v"]:
    """Mark the tokens that a row holds; ids of -1 are none."""
    return count_row_tokens(ids, vocab_size) > 0


def count_row_tokens(ids: Int[Array, "b t"], vocab_size: int) -> Int[Array, "b v"]:
    """How often a row holds each token; ids of -1 are none."""
    rows = jnp.arange(ids.shape[0])[:, None]
    places = jnp.where(ids < 0, vocab_size, ids)
    counts = jnp.zeros((ids.shape[0], vocab_size), jnp.int32)
    return counts.at[rows, places].add(1, mode="drop")


def repeated_ngrams(
    ids: Int[Array, "b t"],
    size: int,
    vocab_size: int,
    source: Int[Array, "b u"] | None = None,
) -> Bool[Array, "b v"]:
    """Mark the tokens that would complete an n-gram of `size` tokens which the row holds already
    (Paulus et al., 2017), or which the row's source holds.

    Args:
        source: other tokens, -1 = padding; None = the row itself.
    """
    source = ids if source is None else source
    width, starts = ids.shape[1], source.shape[1] - size + 1
    if starts < 1 or width < size - 1:
        return jnp.zeros((ids.shape[0], vocab_size), bool)
    same = jnp.ones((ids.shape[0], starts), bool)
    for i in range(size - 1):
        latest = ids[:, width - size + 1 + i, None]
        same &= (source[:, i : i + starts] == latest) & (latest >= 0)
    return mark_row_tokens(jnp.where(same, source[:, size - 1 :], -1), vocab_size)


def sequence_bias(
    ids: Int[Array, "b t"],
    prefixes: Int[Array, "m n-1"],
    last: Int[Array, " m"],
    bias: Float[Array, " m"],
    vocab_size: int,
) -> Float[Array, "b v"]:
    """The sum of biases of sequences that the next token would complete.

    Args:
        prefixes: all but the last token of each sequence, right-aligned; -1 before the first token.
        last: the last tokens.
        bias: of each sequence; -inf bans it.
    """
    n = prefixes.shape[1]
    shortfall = max(n - ids.shape[1], 0)
    latest = jnp.pad(ids, ((0, 0), (shortfall, 0)), constant_values=-1)
    latest = latest[:, latest.shape[1] - n :]
    same = (prefixes[None] == latest[:, None]) | (prefixes[None] < 0)
    biases = jnp.where(jnp.all(same, axis=-1), bias, 0.0)
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], vocab_size), jnp.float32).at[rows, last[None]].add(biases)


def without(logits: Float[Array, "b v"], tokens: Int[Array, " m"]) -> Float[Array, "b v"]:
    """The logits with these tokens impossible; ids of -1 are none."""
    places = jnp.where(tokens < 0, logits.shape[-1], tokens)
    return logits.at[:, places].set(-jnp.inf, mode="drop")


def only(logits: Float[Array, "b v"], tokens: Int[Array, " m"]) -> Float[Array, "b v"]:
    """The logits with nothing else possible: 0 for these tokens, -inf for others."""
    return jnp.full_like(logits, -jnp.inf).at[:, tokens].set(0.0)
