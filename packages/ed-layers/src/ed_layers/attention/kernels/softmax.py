"""The online softmax (Milakov & Gimelshein 2018): attention to some keys, then to more.

Every reader goes over its keys in blocks by `over_blocks`: projected keys, slots of a cache, pages.
Readers differ in how they fetch a block and score it, and in whether parts are merged along an
axis (splits side by side), over devices (slots that are split), or one after another (a ring).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ed_layers.devices import Axes

#: `j -> scores of block j [..., y], weighted sum of its values: weights [..., y] -> [..., d]`.
Block = Callable[[jax.Array], tuple[jax.Array, Callable[[jax.Array], jax.Array]]]
Bound = int | jax.Array


class Part(NamedTuple):
    """Attention of queries to some of their keys, not normalised yet.

    Attributes:
        top: highest score, [..., 1]; -inf where no key is visible.
        total: sum of exp(score - top), [..., 1].
        acc: sum of exp(score - top) * value, [..., d].
    """

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def empty(cls, queries: tuple[int, ...], width: int, dtype: DTypeLike) -> Part:
        """Attention to no key."""
        return cls(
            jnp.full((*queries, 1), -jnp.inf, dtype),
            jnp.zeros((*queries, 1), dtype),
            jnp.zeros((*queries, width), dtype),
        )

    def and_block(self, scores: jax.Array, weighted_sum: Callable[[jax.Array], jax.Array]) -> Part:
        """Add one block of keys, whose masked scores are -inf."""
        top = jnp.maximum(self.top, jnp.max(scores, axis=-1, keepdims=True))
        anchor = finite(top)
        weights, decay = jnp.exp(scores - anchor), jnp.exp(self.top - anchor)
        total = self.total * decay + jnp.sum(weights, axis=-1, keepdims=True)
        return Part(top, total, self.acc * decay + weighted_sum(weights))

    def below(self, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Total and sum, measured from a score that is at least as high."""
        decay = jnp.exp(self.top - finite(top))
        return self.total * decay, self.acc * decay

    def merged(self, other: Part) -> Part:
        """Attention to the keys of both."""
        top = jnp.maximum(self.top, other.top)
        (total, acc), (total_j, acc_j) = self.below(top), other.below(top)
        return Part(top, total + total_j, acc + acc_j)

    def merged_along(self, axis: int) -> Part:
        """Attention to the keys of all parts along an axis."""
        top = jnp.max(self.top, axis=axis, keepdims=True)
        total, acc = self.below(top)
        return Part(jnp.squeeze(top, axis), jnp.sum(total, axis=axis), jnp.sum(acc, axis=axis))

    def merged_over(self, axes: Axes) -> Part:
        """Attention to the keys of all devices along mesh axes; inside `shard_map`."""
        top = jax.lax.pmax(self.top, axes)
        total, acc = self.below(top)
        return Part(top, jax.lax.psum(total, axes), jax.lax.psum(acc, axes))

    def beside(self, sinks: jax.Array) -> Part:
        """The same with sinks, one more logit per head that takes part and has no value."""
        sinks = sinks.astype(self.top.dtype)
        top = jnp.maximum(self.top, sinks)
        total, acc = self.below(top)
        return Part(top, total + jnp.exp(sinks - finite(top)), acc)

    @property
    def out(self) -> jax.Array:
        """The softmax-weighted values; zeros for a query that sees nothing."""
        return self.acc / jnp.where(self.total == 0, 1, self.total)

    @property
    def lse(self) -> jax.Array:
        """Log-sum-exp of the scores, [..., 1]; -inf for a query that sees nothing."""
        return self.top + jnp.log(self.total)


def over_blocks(first: Bound, last: Bound, start: Part, block: Block) -> Part:
    """Attention to the keys of blocks `first` to `last`, the last one excluded."""
    return jax.lax.fori_loop(first, last, lambda j, part: part.and_block(*block(j)), start)


def finite(top: jax.Array) -> jax.Array:
    """A highest score to subtract: 0 where there is none, so that exp(-inf - top) is 0."""
    return jnp.where(jnp.isfinite(top), top, 0)


def share_beside(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """What is left for the keys when a sink takes part in the softmax: 0 where there are none.

    For attention that is normalised already, and differentiated.
    """
    # A sink of -inf is none; beside no keys, inf - inf would be NaN.
    sinks = jnp.maximum(sinks.astype(lse.dtype), jnp.finfo(lse.dtype).min)
    return sigmoid(lse - sinks)


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
    """The logistic function, whose derivative keeps its digits where the value is near 1: jax's own
    is `s * (1 - s)`, and 1 - s is rounded to nothing there."""
    return jax.nn.sigmoid(x)


@sigmoid.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (d_x,) = primals, tangents
    return sigmoid(x), sigmoid(x) * sigmoid(-x) * d_x
