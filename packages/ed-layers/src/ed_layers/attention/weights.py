"""Attention weights of a layer, for losses that compare them.

Mechanisms do not return weights. `attention_weights` computes them from queries and keys.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.kernels.vanilla import softmax_weights
from ed_layers.attention.scoring import Scoring


class Watched(NamedTuple):
    """Queries and keys of a layer, after norms and rotary positions, and the score settings."""

    q: Float[Array, "b s h k"]
    k: Float[Array, "b t g k"]
    mask_info: MaskInfo
    scoring: Scoring


def attention_weights(seen: Watched) -> Float[Array, "b h s t"]:
    """Return the weights of each query over the keys; they sum to 1, or are 0 for padding."""
    weights = softmax_weights(*seen, "btgk")
    b, groups, repeat, s, t = weights.shape
    return weights.reshape(b, groups * repeat, s, t)
