"""The options of `generate` that change logits: one table, in Hugging Face's order.

An option is a function and an entry in `PROCESSORS`: its name in a `GenerationConfig`, how its
value is read and checked, and its effect on the scores.

Legend: b rows, t tokens of a row, v vocabulary, c candidates, m sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ed_models.generation import sampling
from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.timestamps import apply_rules, read_rules
from ed_models.generation.values import (
    Bans,
    Biases,
    build_integer_reader,
    callables,
    check_number,
    decay,
    flag,
    token_list,
)


class Apply(Protocol):
    """The effect of an option on the scores of rows: [b, v] -> [b, v]."""

    def __call__(self, scores: jax.Array, value: Any, rows: GeneratedRows, /) -> jax.Array: ...


@dataclass(frozen=True)
class Processor:
    """An option that changes scores.

    Attributes:
        apply: the function of the option.
        read: `(name, value) -> value`, checked, in the form of `apply`. Raises ConfigError.
        off: the value that changes nothing.
        static: another value is another program; otherwise values are arguments of one program.
        drawing: it has an effect only where tokens are drawn.
        needs_end: it has an effect only where a token ends rows.
        token_ids: whole numbers in its value are tokens.
        reads_source: it reads the tokens of the encoder, or of the prompt.
    """

    apply: Apply
    read: Callable[[str, object], Any]
    off: object = None
    static: bool = False
    drawing: bool = False
    needs_end: bool = False
    token_ids: bool = False
    reads_source: bool = False


def build_filter(keep: Callable[[jax.Array, Any], jax.Array]) -> Apply:
    """Create the effect of a function that marks the possible candidates [b, c]."""

    def apply(scores: jax.Array, value: object, rows: GeneratedRows) -> jax.Array:
        return jnp.where(keep(scores, value), scores, -jnp.inf)

    return apply


def _in_nucleus(scores: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mark the tokens of the nucleus, like `sampling.in_nucleus`, which reads probabilities."""
    return sampling.in_nucleus(jax.nn.softmax(scores), top_p)


def add_bias(scores: jax.Array, biases: Biases, rows: GeneratedRows) -> jax.Array:
    """Add the biases of sequences that the next token completes."""
    return scores + sampling.sequence_bias(
        rows.ids, biases.prefixes, biases.last, biases.bias, scores.shape[-1]
    )


def ban_words(scores: jax.Array, words: Bans, rows: GeneratedRows) -> jax.Array:
    """Make sequences impossible, except those that are just an end token."""
    single = jnp.all(words.prefixes < 0, axis=1) & jnp.isin(words.last, rows.eos)
    biases = Biases(words.prefixes, words.last, jnp.where(single, 0.0, -jnp.inf))
    return add_bias(scores, biases, rows)


def _penalize_repetition(scores: jax.Array, factor: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Lower the scores of all tokens of the row, including those of the prompt."""
    seen = sampling.mark_row_tokens(rows.ids, scores.shape[-1])
    return sampling.penalize_repetition(scores, seen, factor)


def favour_source(scores: jax.Array, factor: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Raise the scores of the tokens of the encoder, or of the prompt, for a factor above 1."""
    assert rows.source is not None
    seen = sampling.mark_row_tokens(rows.source, scores.shape[-1])
    return sampling.penalize_repetition(scores, seen, 1 / factor)


def penalize_presence(scores: jax.Array, penalty: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Subtract from the scores of generated tokens, as OpenAI's API does; the prompt is ignored."""
    return scores - penalty * sampling.mark_row_tokens(rows.get_new_tokens(), scores.shape[-1])


def penalize_frequency(scores: jax.Array, penalty: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Subtract the penalty once for each earlier occurrence of a token; the prompt is ignored."""
    return scores - penalty * sampling.count_row_tokens(rows.get_new_tokens(), scores.shape[-1])


def ban_ngrams(scores: jax.Array, size: int, rows: GeneratedRows) -> jax.Array:
    """Allow no n-gram twice in a row, including the n-grams of the prompt."""
    banned = sampling.repeated_ngrams(rows.ids, size, scores.shape[-1])
    return jnp.where(banned, -jnp.inf, scores)


def ban_source_ngrams(scores: jax.Array, size: int, rows: GeneratedRows) -> jax.Array:
    """Allow no n-gram of the encoder's tokens, or of the prompt."""
    assert rows.source is not None
    banned = sampling.repeated_ngrams(rows.ids, size, scores.shape[-1], rows.source)
    return jnp.where(banned, -jnp.inf, scores)


def hold_open(scores: jax.Array, fewest: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Suppress end tokens until a row has `fewest` new tokens."""
    is_early = (rows.new < fewest)[:, None]
    return jnp.where(is_early, sampling.without(scores, rows.eos), scores)


def force_begin(scores: jax.Array, tokens: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Force the token that follows a prompt of a single token."""
    single = jnp.sum(rows.ids >= 0, axis=1, keepdims=True) == 1
    return jnp.where(single, sampling.only(scores, tokens), scores)


def force_end(scores: jax.Array, tokens: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Force the last token of a row that reaches its limit."""
    last = (rows.new == rows.limit - 1)[:, None]
    return jnp.where(last, sampling.only(scores, tokens), scores)


def remove_invalid(scores: jax.Array, _: object, rows: GeneratedRows) -> jax.Array:
    """Replace NaN by 0, and infinities by the largest and the smallest number."""
    return jnp.nan_to_num(scores, nan=0.0)


def hasten_end(
    scores: jax.Array, value: tuple[jax.Array, jax.Array], rows: GeneratedRows
) -> jax.Array:
    """Raise the scores of end tokens more with each token; see `values.decay`."""
    start, factor = value
    excess_tokens = rows.new - start
    growth = jnp.where(excess_tokens > 0, factor ** jnp.maximum(excess_tokens, 0) - 1, 0.0)[:, None]
    end = jnp.isin(jnp.arange(scores.shape[-1]), rows.eos) & jnp.isfinite(scores)
    return scores + jnp.where(end, jnp.abs(scores), 0.0) * growth


def suppress(scores: jax.Array, tokens: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Exclude tokens that are never generated."""
    return sampling.without(scores, tokens)


def suppress_first(scores: jax.Array, tokens: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Exclude tokens that are never generated first."""
    first = (rows.new == 0)[:, None]
    return jnp.where(first, sampling.without(scores, tokens), scores)


def call(
    scores: jax.Array,
    functions: Sequence[Callable[[jax.Array, jax.Array], jax.Array]],
    rows: GeneratedRows,
) -> jax.Array:
    """Apply the functions of the caller in their order."""
    for function in functions:
        changed = function(rows.ids, scores)
        if changed.shape != scores.shape:
            raise ValueError(
                f"a function of logits_processor turned scores of shape {scores.shape} into "
                f"{changed.shape}; it must keep the shape"
            )
        scores = changed.astype(scores.dtype)
    return scores


def divide(scores: jax.Array, temperature: jax.Array, rows: GeneratedRows) -> jax.Array:
    """Divide by the temperature: values below 1 sharpen, values above 1 flatten."""
    return scores / temperature


def _normalize(scores: jax.Array, _: object, rows: GeneratedRows) -> jax.Array:
    """Return log-probabilities."""
    return jax.nn.log_softmax(scores)


_ABOVE_ZERO = check_number(lambda x: x > 0, "above 0; 1 is no penalty")
_TWO_SIDED = check_number(lambda x: -2 <= x <= 2, "between -2 and 2; 0 is no penalty")
_SHARE = check_number(lambda x: 0 < x <= 1, "above 0 and at most 1")
_CUTOFF = check_number(lambda x: 0 <= x < 1, "at least 0 and below 1; 0 drops nothing")

#: name -> processor; in the order of `transformers` (`_get_logits_processor`).
# `timestamp_rules` is an option of this project.
PROCESSORS: Mapping[str, Processor] = {
    "sequence_bias": Processor(add_bias, Biases.read, token_ids=True),
    "encoder_repetition_penalty": Processor(favour_source, _ABOVE_ZERO, off=1.0, reads_source=True),
    "repetition_penalty": Processor(_penalize_repetition, _ABOVE_ZERO, off=1.0),
    "presence_penalty": Processor(penalize_presence, _TWO_SIDED, off=0.0),
    "frequency_penalty": Processor(penalize_frequency, _TWO_SIDED, off=0.0),
    "no_repeat_ngram_size": Processor(
        ban_ngrams, build_integer_reader(0, 1024), off=0, static=True
    ),
    "encoder_no_repeat_ngram_size": Processor(
        ban_source_ngrams, build_integer_reader(0, 1024), off=0, static=True, reads_source=True
    ),
    "bad_words_ids": Processor(ban_words, Bans.read, token_ids=True),
    "min_new_tokens": Processor(hold_open, build_integer_reader(0), off=0, needs_end=True),
    "forced_bos_token_id": Processor(force_begin, token_list(1), token_ids=True),
    "forced_eos_token_id": Processor(force_end, token_list(), token_ids=True),
    "remove_invalid_values": Processor(remove_invalid, flag, off=False, static=True),
    "exponential_decay_length_penalty": Processor(hasten_end, decay, needs_end=True),
    "suppress_tokens": Processor(suppress, token_list(), token_ids=True),
    "begin_suppress_tokens": Processor(suppress_first, token_list(), token_ids=True),
    "timestamp_rules": Processor(apply_rules, read_rules, static=True),
    "logits_processor": Processor(call, callables, off=(), static=True),
    "temperature": Processor(
        divide,
        check_number(lambda x: x > 0, "above 0 (for the likeliest token: do_sample=False)"),
        drawing=True,
    ),
    "top_k": Processor(
        build_filter(sampling.among_largest),
        build_integer_reader(1, constraint="a whole number of at least 1, or None for all"),
        static=True,
        drawing=True,
    ),
    "top_p": Processor(build_filter(_in_nucleus), _SHARE, off=1.0, drawing=True),
    "min_p": Processor(
        build_filter(sampling.likely_enough),
        check_number(lambda x: 0 <= x <= 1, "between 0 and 1"),
        off=0.0,
        drawing=True,
    ),
    "typical_p": Processor(build_filter(sampling.is_typical), _SHARE, off=1.0, drawing=True),
    "epsilon_cutoff": Processor(
        build_filter(sampling.above_epsilon), _CUTOFF, off=0.0, drawing=True
    ),
    "eta_cutoff": Processor(build_filter(sampling.above_eta), _CUTOFF, off=0.0, drawing=True),
    "renormalize_logits": Processor(_normalize, flag, off=False, static=True),
}
