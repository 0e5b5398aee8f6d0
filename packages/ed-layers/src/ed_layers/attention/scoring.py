"""The settings of attention scores: scale, limits, biases, dropout.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.masks import MaskInfo
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ed_layers.dropout import get_seed, get_threshold, hash_bits

#: Features beyond causal self-attention with grouped heads and segments, which every mechanism
#: supports: name -> words for messages.
FEATURES: dict[str, str] = {
    "bidirectional": "attention in both directions",
    "ahead": "queries that attend to later keys",
    "cross": "other lengths of queries and keys",
    "window": "a window",
    "chunk": "chunks",
    "soft_cap": "a soft cap",
    "sinks": "sinks",
    "value_dim": "values of another width than keys",
    "bias": "a bias",
    "alibi": "ALiBi",
    "relative": "relative position buckets",
    "dropout": "dropout",
}

#: A window or a chunk: an int, or a traced scalar in which 0 = no limit.
WindowLimit = int | Int[Array, ""]


def static(limit: WindowLimit | None) -> bool:
    """Return whether a window or chunk is known when the program is traced."""
    return limit is None or isinstance(limit, int)


def get_static_limit(limit: WindowLimit | None) -> int | None:
    """Return a static window or chunk; None for "no limit", which may also be 0."""
    return limit if isinstance(limit, int) and limit > 0 else None


@dataclass(frozen=True)
class Alibi:
    """A bias by distance, without positions in queries and keys (Press et al. 2022).

    Attributes:
        slopes: decrease of the score per token of distance, one per head.
        factor: factor on the bias, after rounding.
        dtype: dtype to which slope times key position is rounded (Falcon: "bfloat16"); None = no
            rounding.
    """

    slopes: tuple[float, ...]
    factor: float = 1.0
    dtype: str | None = None

    def bias(
        self, heads: Int[Array, "g r"], q_index: Int[Array, "b s"], k_index: Int[Array, "b t"]
    ) -> Float[Array, "b g r s t"]:
        """Return the bias of the scores.

        Args:
            heads: numbers of the heads.
            q_index, k_index: order of queries and keys within their segments.
        """
        slopes = jnp.asarray(self.slopes, jnp.float32)[heads][None, :, :, None, None]
        keys, queries = k_index[:, None, None, None, :], q_index[:, None, None, :, None]
        bias = slopes * (keys - queries)
        if self.dtype is not None:
            place = slopes * keys
            bias = bias + (place.astype(self.dtype).astype(jnp.float32) - place)
        return bias * self.factor


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of Press et al. 2022: a geometric sequence that ends at 2^-8.

    If the number of heads is not a power of two, the heads beyond the largest power of two below
    it use every other slope of the next power.
    """
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return tuple(slopes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RelativeBias:
    """A trained bias per head and bucket of distances (T5, Raffel et al. 2020).

    Attributes:
        table: [n, h], n buckets.
        max_distance: distances from here on share the last bucket.
        causal: all buckets are for earlier keys; otherwise half of them are for later keys.
    """

    table: Float[Array, "n h"]
    max_distance: int = field(metadata={"static": True})
    causal: bool = field(metadata={"static": True})

    def bias(
        self, heads: Int[Array, "g r"], q_index: Int[Array, "b s"], k_index: Int[Array, "b t"]
    ) -> Float[Array, "b g r s t"]:
        """Return the bias of the scores; see `Alibi.bias`."""
        bucket = self.buckets(k_index[:, None, :] - q_index[:, :, None])
        return jnp.moveaxis(self.table[:, heads][bucket], (1, 2), (3, 4))

    def by_distance(self) -> Float[Array, "h m"]:
        """Return the bias of each distance from -max_distance to max_distance, float32.

        Distances beyond have the bias of the nearest one.
        """
        ahead = jnp.arange(-self.max_distance, self.max_distance + 1)
        return self.table.T[:, self.buckets(ahead)].astype(jnp.float32)

    def buckets(self, ahead: Int[Array, "*dims"]) -> Int[Array, "*dims"]:
        """Return the bucket of each distance: the index of the key minus that of the query."""
        count = self.table.shape[0] if self.causal else self.table.shape[0] // 2
        bucket_table = jnp.asarray(_buckets(count, self.max_distance))
        distance = jnp.maximum(-ahead, 0) if self.causal else jnp.abs(ahead)
        bucket = bucket_table[jnp.minimum(distance, self.max_distance)]
        return bucket if self.causal else bucket + jnp.where(ahead > 0, count, 0)


@cache
def _buckets(count: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance from 0 to `max_distance`, computed as in transformers.

    The first half of the buckets holds one distance each; the others grow logarithmically.
    """
    exact = count // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    growth = np.log(np.maximum(distance, 1) / np.float32(exact), dtype=np.float32)
    steps = growth / np.float32(math.log(max_distance / exact)) * np.float32(count - exact)
    large = np.minimum(exact + steps.astype(np.int32), count - 1)
    return np.where(distance < exact, distance.astype(np.int32), large)


@dataclass(frozen=True)
class Scoring:
    """The settings of the scores of one call; `attend` describes them.

    Attributes:
        scale: factor on q·k.
        window, chunk: limits, or None.
        soft_cap: bound of the scores.
        sinks: one logit per head, [h].
        bias: [b or 1, h or 1, s, t], added to the scores after the soft cap.
        alibi: a bias by distance, added after the soft cap.
        relative: a trained bias by distance, added after the soft cap.
        dropout: probability that an attention weight is dropped; 0 unless there is a `dropout_key`.
        dropout_key: PRNG key.
        softmax_dtype: dtype of scores, softmax and sums.
    """

    scale: float
    window: WindowLimit | None = None
    chunk: WindowLimit | None = None
    soft_cap: float | None = None
    sinks: Float[Array, " h"] | None = None
    bias: Float[Array, "#b #h s t"] | None = None
    alibi: Alibi | None = None
    relative: RelativeBias | None = None
    dropout: float = 0.0
    dropout_key: jax.Array | None = None
    softmax_dtype: DTypeLike = jnp.float32

    @property
    def asked(self) -> frozenset[str]:
        """The names of FEATURES that these settings use."""
        names = ("window", "chunk", "soft_cap", "sinks", "bias", "alibi", "relative")
        used = frozenset(name for name in names if getattr(self, name) is not None)
        return used | {"dropout"} if self.dropout > 0 else used

    def features(self, q: jax.Array, v: jax.Array, mask_info: MaskInfo) -> frozenset[str]:
        """Return the names of FEATURES that a call uses, as known when the program is traced.

        Args:
            q: [b, s, h, k].
            v: [b, t, g, d].
        """
        shapes = {
            "bidirectional": not mask_info.causal,
            "ahead": mask_info.ahead is not None,
            "cross": q.shape[1] != v.shape[1],
            "value_dim": q.shape[-1] != v.shape[-1],
        }
        return self.asked | {name for name, is_used in shapes.items() if is_used}

    @property
    def by_distance(self) -> bool:
        """Whether a bias depends on the distance of query and key."""
        return self.alibi is not None or self.relative is not None

    def distance_bias(
        self, heads: Int[Array, "g r"], q_index: Int[Array, "b s"], k_index: Int[Array, "b t"]
    ) -> Float[Array, "b g r s t"]:
        """Return the sum of the biases by distance, if there are any; see `Alibi.bias`."""
        biases = [x for x in (self.alibi, self.relative) if x is not None]
        terms = [x.bias(heads, q_index, k_index) for x in biases]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def cap(self, scores: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """Return the scores within the soft cap, and the derivative of the cap."""
        if self.soft_cap is None:
            return scores, 1.0
        squashed = jnp.tanh(scores / self.soft_cap)
        return self.soft_cap * squashed, 1 - squashed**2


def split_heads(x: Float[Array, "b h *rest"], groups: int, repeat: int) -> jax.Array:
    """Reshape [b, h or 1, ...] to [b, g, r, ...] or [b, 1, 1, ...]."""
    lead = (1, 1) if x.shape[1] == 1 else (groups, repeat)
    return x.reshape(x.shape[0], *lead, *x.shape[2:])


def get_head_indices(groups: int, repeat: int) -> Int[Array, "g r"]:
    """Return the numbers of all heads, grouped by key head."""
    return jnp.arange(groups * repeat).reshape(groups, repeat)


def compute_dropout_mask(
    key: jax.Array,
    rate: float,
    row: Int[Array, ...],
    head: Int[Array, ...],
    query: Int[Array, ...],
    position: Int[Array, ...],
) -> Bool[Array, ...]:
    """Return which attention weights dropout keeps, from the key and the coordinates of a weight.

    All mechanisms drop the same weights, whatever their blocks. The bits are the integer hash of
    `ed_layers.dropout`.

    Args:
        key: random key.
        rate: probability of dropping.
        row, head, query, position: coordinates, int arrays that broadcast against each other.
    """
    seed = get_seed(key)
    x = seed[0]
    for coordinate in (row, head, query):
        x = hash_bits(x ^ (coordinate.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    x = hash_bits(x ^ hash_bits(position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77) ^ seed[1]))
    return x >= get_threshold(rate)


def pad_axis(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Append `count` zeros to an axis."""
    return jnp.pad(x, [(0, count if i == axis % x.ndim else 0) for i in range(x.ndim)])
