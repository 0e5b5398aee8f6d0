"""The rules of Whisper for tokens that name times (Radford et al. 2022, section 2.3).

Legend: b rows, t tokens of a row, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from jaxtyping import Array, Float

from ed_models.generation.generated_rows import GeneratedRows


@dataclass(frozen=True)
class TimestampRules:
    """Which tokens name times, and when they may follow.

    Times come in pairs, the end of a segment and the start of the next one, except before the end
    of the text. They never decrease. The first token of a row is a time. If all times together are
    likelier than each other token, the next token is a time.

    Attributes:
        first: number of the token of time 0; all later tokens of the vocabulary name later times.
        end: the token that ends a row. Smaller numbers are text.
        without: the token that asks for text without times; never generated.
        most_initial: the largest first time of a row, in tokens after `first`; None = no limit.
    """

    first: int
    end: int
    without: int
    most_initial: int | None = None


def read_rules(name: str, value: object) -> TimestampRules:
    """Return the rules.

    Raises:
        ConfigError: the value is not a `TimestampRules`.
    """
    if not isinstance(value, TimestampRules):
        raise ConfigError(f"{name} is {value!r}; it must be a TimestampRules")
    return value


def apply_rules(
    scores: Float[Array, "b v"], rules: TimestampRules, rows: GeneratedRows
) -> Float[Array, "b v"]:
    """Make the tokens impossible that the rules exclude."""
    token = jnp.arange(scores.shape[-1])[None]
    is_time = token >= rules.first
    generated = rows.get_new_tokens()
    new = jnp.broadcast_to(rows.new, scores.shape[:1])[:, None]
    last_is_time = generated[:, -1:] >= rules.first
    earlier_is_time = (generated[:, -2:-1] >= rules.first) | (new < 2)
    latest = jnp.max(jnp.where(generated >= rules.first, generated, -1), axis=1, keepdims=True)
    may_repeat = last_is_time & ~earlier_is_time
    least = jnp.where(latest < 0, rules.first, jnp.where(may_repeat, latest, latest + 1))
    banned = token == rules.without
    banned |= last_is_time & earlier_is_time & is_time
    banned |= may_repeat & (token < rules.end)
    banned |= is_time & (token < least)
    begins = new == 0
    banned |= begins & ~is_time
    if rules.most_initial is not None:
        banned |= begins & (token > rules.first + rules.most_initial)
    scores = jnp.where(banned, -jnp.inf, scores)
    logprobs = jax.nn.log_softmax(scores, axis=-1)
    times = jax.nn.logsumexp(jnp.where(is_time, logprobs, -jnp.inf), axis=-1, keepdims=True)
    text = jnp.max(jnp.where(is_time, -jnp.inf, logprobs), axis=-1, keepdims=True)
    return jnp.where((times > text) & ~is_time, -jnp.inf, scores)
