"""The online softmax (Milakov & Gimelshein 2018), which processes keys block by block.

`over_blocks` loops over the blocks of projected keys, of the slots of a cache, or of pages. Partial
results are merged along an axis (parallel splits), over devices (split slots), or one after another
(a ring).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ed_layers.devices import AxisNames

#: `j -> scores of block j [..., y], weighted sum of its values: weights [..., y] -> [..., d]`.
ScoreBlock = Callable[[jax.Array], tuple[jax.Array, Callable[[jax.Array], jax.Array]]]
Bound = int | jax.Array


class PartialAttention(NamedTuple):
    """Attention of queries to some of their keys, before normalization.

    Attributes:
        top: highest score, [..., 1]; -inf if no key is visible.
        total: sum of exp(score - top), [..., 1].
        acc: sum of exp(score - top) * value, [..., d].
    """

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def empty(cls, queries: tuple[int, ...], width: int, dtype: DTypeLike) -> PartialAttention:
        """Return attention to no key."""
        return cls(
            jnp.full((*queries, 1), -jnp.inf, dtype),
            jnp.zeros((*queries, 1), dtype),
            jnp.zeros((*queries, width), dtype),
        )

    def and_block(
        self, scores: jax.Array, weighted_sum: Callable[[jax.Array], jax.Array]
    ) -> PartialAttention:
        """Add one block of keys, whose masked scores are -inf."""
        top = jnp.maximum(self.top, jnp.max(scores, axis=-1, keepdims=True))
        anchor = _finite(top)
        weights, decay = jnp.exp(scores - anchor), jnp.exp(self.top - anchor)
        total = self.total * decay + jnp.sum(weights, axis=-1, keepdims=True)
        return PartialAttention(top, total, self.acc * decay + weighted_sum(weights))

    def below(self, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return total and sum relative to a score that is at least as high."""
        decay = jnp.exp(self.top - _finite(top))
        return self.total * decay, self.acc * decay

    def merge(self, part: PartialAttention) -> PartialAttention:
        """Return attention to the keys of both parts."""
        top = jnp.maximum(self.top, part.top)
        (total, acc), (total_j, acc_j) = self.below(top), part.below(top)
        return PartialAttention(top, total + total_j, acc + acc_j)

    def merged_along(self, axis: int) -> PartialAttention:
        """Return attention to the keys of all parts along an axis."""
        top = jnp.max(self.top, axis=axis, keepdims=True)
        total, acc = self.below(top)
        return PartialAttention(
            jnp.squeeze(top, axis), jnp.sum(total, axis=axis), jnp.sum(acc, axis=axis)
        )

    def merged_over(self, axes: AxisNames) -> PartialAttention:
        """Return attention to the keys of all devices along mesh axes; inside `shard_map`."""
        top = jax.lax.pmax(self.top, axes)
        total, acc = self.below(top)
        return PartialAttention(top, jax.lax.psum(total, axes), jax.lax.psum(acc, axes))

    def beside(self, sinks: jax.Array) -> PartialAttention:
        """Return the part with sinks: one logit per head without a value."""
        sinks = sinks.astype(self.top.dtype)
        top = jnp.maximum(self.top, sinks)
        total, acc = self.below(top)
        return PartialAttention(top, total + jnp.exp(sinks - _finite(top)), acc)

    @property
    def out(self) -> jax.Array:
        """The softmax-weighted values; zeros for a query without visible keys."""
        return self.acc / jnp.where(self.total == 0, 1, self.total)

    @property
    def lse(self) -> jax.Array:
        """Log-sum-exp of the scores, [..., 1]; -inf for a query without visible keys."""
        return self.top + jnp.log(self.total)


def over_blocks(
    first: Bound, last: Bound, start: PartialAttention, block: ScoreBlock
) -> PartialAttention:
    """Return attention to the keys of blocks `first` to `last - 1`."""
    return jax.lax.fori_loop(first, last, lambda j, part: part.and_block(*block(j)), start)


def _finite(top: jax.Array) -> jax.Array:
    """Return the highest score, or 0 if there is none, so that exp(-inf - top) is 0."""
    return jnp.where(jnp.isfinite(top), top, 0)


def share_beside(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """Return the share of the softmax that remains for the keys next to a sink; 0 without keys.

    Kernels multiply their normalized output by this share. It is differentiable.
    """
    # A sink of -inf means no sink; without keys, inf - inf would be NaN.
    sinks = jnp.maximum(sinks.astype(lse.dtype), jnp.finfo(lse.dtype).min)
    return _sigmoid(lse - sinks)


@jax.custom_jvp
def _sigmoid(x: jax.Array) -> jax.Array:
    """Return the logistic function, with an accurate derivative for values near 1.

    jax's derivative is `s * (1 - s)`, in which `1 - s` is rounded to 0.
    """
    return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (d_x,) = primals, tangents
    return _sigmoid(x), _sigmoid(x) * _sigmoid(-x) * d_x
