"""Attention that reads a contiguous cache: prompts, and one token after the other.

Legend: b batch, s queries, g kv heads, t slots, h heads, k head dim.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from ed_layers.attention.choose import choose
from ed_layers.attention.dispatch import PROJECTED
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.vanilla import vanilla_attention
from ed_layers.cache.protocol import Stored


def attend_to_cache(
    q: Float[Array, "b s h k"], stored: Stored, scoring: Scoring, mechanism: Mechanism
) -> Float[Array, "b s h d"]:
    """Attention to what a cache has stored; see `attend`.

    One query has a score matrix of one row, so only `decode_attn_mechanism` takes it away from
    "vanilla".
    """
    name = mechanism.decode
    if name is None:
        features = scoring.features(q, q, stored.mask_info) | {"cross"}
        name = "vanilla" if q.shape[1] == 1 else choose(mechanism, q, stored.k, features)
    if name != "vanilla":
        k, v = (x.swapaxes(1, 2) for x in (stored.k, stored.v))
        return PROJECTED[name](q, k, v, stored.mask_info, scoring, mechanism)
    return vanilla_attention(
        q,
        stored.k,
        stored.v,
        stored.mask_info,
        scoring,
        mechanism,
        kv_order="bgtk",
        one_by_sum=stored.layout == "leaves",
    )
