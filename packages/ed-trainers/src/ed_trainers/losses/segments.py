"""From figures of tokens to figures of segments: the answers that share a row.

A row of s positions has at most s segments, numbered from 1; slot j of a row is segment j + 1, so
that shapes never depend on the data. A slot without a segment has the value 0 and is not present.

Legend: r rows, s positions, and slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def segment_sums(
    values: Float[Array, "r s"], segment_ids: Int[Array, "r s"]
) -> Float[Array, "r s"]:
    """Sum the values of each segment; the value of padding (segment 0) counts nowhere."""
    s = values.shape[-1]

    def sum_row(row: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, segments, num_segments=s + 1)[1:]

    return jax.vmap(sum_row)(values, segment_ids)


def last_tokens(segment_ids: np.ndarray) -> np.ndarray:
    """1 at the last token of each segment of rows [..., s], else 0; float32, on the host."""
    following = np.zeros_like(segment_ids)
    following[..., :-1] = segment_ids[..., 1:]
    return ((segment_ids > 0) & (segment_ids != following)).astype(np.float32)


class Answers(NamedTuple):
    """Figures of the answers of a batch, each float32 [r, s], or [b, s] for one side of pairs.

    Attributes:
        logps: log-probability of the answer, in nats; the prompt does not count.
        tokens: of the answer.
    """

    logps: jax.Array
    tokens: jax.Array

    @property
    def present(self) -> jax.Array:
        """1 where the slot holds an answer of at least one token."""
        return (self.tokens > 0).astype(jnp.float32)

    @property
    def mean_logps(self) -> jax.Array:
        """Log-probability per token."""
        return self.logps / jnp.maximum(self.tokens, 1)

    @classmethod
    def of(
        cls,
        token_logps: Float[Array, "r s"],
        weights: Float[Array, "r s"],
        segment_ids: Int[Array, "r s"],
    ) -> Answers:
        """Sum values over the tokens of each answer; values are at the predicting positions."""
        return cls(
            segment_sums(token_logps * weights, segment_ids), segment_sums(weights, segment_ids)
        )
