"""What a layer's attention compares, and the weights that it gives: for whoever learns from them.

Mechanisms do not keep weights; here they are computed once more, for some queries at a time.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.kernels.vanilla import softmax_weights
from ed_layers.attention.scoring import Scoring


class Watched(NamedTuple):
    """Queries and keys of a layer, as they meet, and how they are compared."""

    q: Float[Array, "b s h k"]
    k: Float[Array, "b t g k"]
    mask_info: MaskInfo
    scoring: Scoring


def attention_weights(seen: Watched) -> Float[Array, "b h s t"]:
    """Weights of each query over the keys, which sum to 1; zeros for padding."""
    weights = softmax_weights(*seen, "btgk")
    b, groups, repeat, s, t = weights.shape
    return weights.reshape(b, groups * repeat, s, t)
