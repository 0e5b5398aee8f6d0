"""Attention masks: `MaskInfo`, and masks as arrays.

Shapes: `b` batch, `s` query positions, `t` key positions, `n` segments.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, Int

#: A window or a chunk in positions: a constant, or a traced scalar (0 = no limit).
Limit = int | jax.Array | None


def segment_index(segment_ids: ArrayLike) -> Int[jax.Array, "b s"]:
    """Return the index of each position inside its segment: int32 [b, s], from 0.

    Padding (segment 0) inside a segment is counted, which keeps the order. Segment ids must
    increase along a row.
    """
    segments = jnp.asarray(segment_ids, jnp.int32)
    reached = jax.lax.cummax(segments, axis=1)
    previous_maximum = jnp.pad(reached, ((0, 0), (1, 0)))[:, :-1]
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    starts = jax.lax.cummax(jnp.where(reached > previous_maximum, places, 0), axis=1)
    return places - starts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskInfo:
    """An attention mask as segments and order, with memory linear in the length.

    A query attends to keys of the same segment. Segment 0 is padding, which neither attends nor is
    attended to. A causal query attends only to keys whose index is not greater than its own, and
    to the next `ahead` keys. The index is the order of tokens in a segment; `position_ids` only
    affect rotary angles.

    Attributes:
        q_segment_ids: int32 [b, s], 0 = padding.
        kv_segment_ids: int32 [b, t], 0 = padding.
        q_index: int32 [b, s].
        kv_index: int32 [b, t].
        causal: Whether attention is causal; static.
        in_order: Whether queries and keys are the same tokens in the order of the row, so that
            differences of indices equal differences of places. Static; some kernels require it.
            False if unknown.
        ahead: int32 [b, s]: number of later keys that a causal query attends to, such as the later
            tokens of its image (Gemma 3). None = 0.
        needs_matrix: Whether only `get_mask` knows the mask, because a subclass limits it further.
    """

    needs_matrix: ClassVar[bool] = False

    q_segment_ids: Int[jax.Array, "b s"]
    kv_segment_ids: Int[jax.Array, "b t"]
    q_index: Int[jax.Array, "b s"]
    kv_index: Int[jax.Array, "b t"]
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    in_order: bool = dataclasses.field(default=False, metadata={"static": True})
    ahead: Int[jax.Array, "b s"] | None = None

    @classmethod
    def from_segments(cls, segment_ids: ArrayLike, causal: bool = True) -> MaskInfo:
        """Create the mask of self-attention over packed rows, from int [b, s], 0 = padding."""
        segments = jnp.asarray(segment_ids, jnp.int32)
        index = segment_index(segments)
        return cls(segments, segments, index, index, causal, in_order=True)

    @classmethod
    def from_attention_mask(cls, mask: ArrayLike, causal: bool = True) -> MaskInfo:
        """Create the mask of self-attention from Hugging Face's [b, s] mask, nonzero = a token."""
        return cls.from_segments(jnp.asarray(mask) != 0, causal)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: ArrayLike, total: int, causal: bool = True) -> MaskInfo:
        """Create the mask of one flat row from the offsets of its segments.

        Args:
            cu_seqlens: int [n + 1], starting with 0; equal neighbors are empty segments.
            total: Tokens of the row; tokens from `cu_seqlens[-1]` on are padding.
            causal: Whether a token attends only to itself and the tokens before it.
        """
        offsets = jnp.asarray(cu_seqlens, jnp.int32)
        places = jnp.arange(total, dtype=jnp.int32)
        segments = jnp.searchsorted(offsets, places, side="right").astype(jnp.int32)
        segments = jnp.where(places < offsets[-1], segments, 0)
        return cls.from_segments(segments[None], causal)

    @classmethod
    def full(cls, batch: int, length: int, causal: bool = True) -> MaskInfo:
        """Create the mask of self-attention over rows without padding."""
        return cls.from_segments(jnp.ones((batch, length), jnp.int32), causal)

    def forgetful(self, key: jax.Array, min_ratio: ArrayLike, max_ratio: ArrayLike) -> MaskInfo:
        """Hide random keys from all queries of their row (forgetful causal masking, Liu et al.,
        2022). The first key of a segment is kept, so that every query attends to a key.

        Args:
            key: A PRNG key.
            min_ratio: Smallest fraction of hidden keys; each row has a random fraction.
            max_ratio: Largest fraction of hidden keys.
        """
        draw, drop = jax.random.split(key)
        b, t = self.kv_segment_ids.shape
        ratio = jax.random.uniform(draw, (b, 1), minval=min_ratio, maxval=max_ratio)
        keep = (jax.random.uniform(drop, (b, t)) >= ratio) | (self.kv_index == 0)
        segments = jnp.where(keep, self.kv_segment_ids, 0)
        return dataclasses.replace(self, kv_segment_ids=segments, in_order=False)

    def get_mask(self, window: Limit = None, chunk: Limit = None) -> Bool[jax.Array, "b s t"]:
        """Return the mask as bool [b, s, t], True where attention is allowed.

        Args:
            window: Number of keys before and including the query that it attends to (Hugging Face's
                `sliding_window`). An int, or a traced scalar, for which 0 = no limit.
            chunk: Positions of a chunk; a query attends to keys of its chunk. Same type.
        """
        q, k = self.q_index[:, :, None], self.kv_index[:, None, :]
        q_segment, k_segment = self.q_segment_ids[:, :, None], self.kv_segment_ids[:, None, :]
        mask = (q_segment == k_segment) & (q_segment != 0)
        if self.causal:
            mask &= k <= self.last_index[:, :, None]
        if window is not None:
            in_window = q - k < window if self.causal else jnp.abs(q - k) < window
            mask &= in_window | (jnp.asarray(window) <= 0)
        if chunk is not None:
            size = jnp.maximum(jnp.asarray(chunk), 1)
            mask &= (q // size == k // size) | (jnp.asarray(chunk) <= 0)
        return mask

    @property
    def last_index(self) -> Int[jax.Array, "b s"]:
        """The index of the last key that a causal query attends to."""
        return self.q_index if self.ahead is None else self.q_index + self.ahead

    def create_bias(
        self, dtype: DTypeLike = jnp.float32, window: Limit = None, chunk: Limit = None
    ) -> Float[jax.Array, "b 1 s t"]:
        """Return the mask as an additive bias [b, 1, s, t]: 0, or the smallest finite number."""
        return to_bias(self.get_mask(window, chunk)[:, None], dtype)


def to_bias(mask: ArrayLike, dtype: DTypeLike = jnp.float32) -> Float[jax.Array, ...]:
    """Convert a boolean mask to an additive bias: 0 if True, else the smallest finite number."""
    return jnp.where(mask, jnp.zeros((), dtype), jnp.finfo(dtype).min)


def causal_mask(length: int) -> Bool[np.ndarray, "1 1 s s"]:
    """Return the causal mask as bool [1, 1, length, length], True on and below the diagonal."""
    return np.tril(np.ones((length, length), bool))[None, None]


def forgetful_mask(
    key: jax.Array, shape: tuple[int, ...], ratio: ArrayLike
) -> Bool[jax.Array, "b ... s t"]:
    """Return a forgetful causal mask: bool of `shape`, True where attention is kept.

    Each key is dropped with probability `ratio`, for all queries of a row (FCM, Liu et al., 2022).
    The first key is always kept, so that no row is empty.

    Args:
        key: A PRNG key.
        shape: [b, 1, s, t].
        ratio: Probability in [0, 1].
    """
    row = (shape[0], *(1 for _ in shape[1:-1]), shape[-1])
    keep = jax.random.uniform(key, row) >= ratio
    keep = keep.at[..., 0].set(True)
    return jnp.broadcast_to(keep, shape)
