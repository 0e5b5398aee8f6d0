"""Attention that reads a contiguous cache: prompts, and one token after the other.

Legend: b batch, s queries, g kv heads, t slots, h heads, k head dim.
"""

from __future__ import annotations

from typing import Any

from ed_infra.logging import get_logger, once
from jax import Array
from jaxtyping import Float

from ed_layers.attention.choose import choose
from ed_layers.attention.decode import NAME as DECODE
from ed_layers.attention.dispatch import CACHED, PROJECTED
from ed_layers.attention.hardware import platform_of
from ed_layers.attention.mechanism import Mechanism, check
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.vanilla import vanilla_attention
from ed_layers.cache.codes import Codes, decode
from ed_layers.cache.protocol import Stored

logger = get_logger(__name__)

# Slots of a row from which a single query follows what is written instead of scoring every slot.
# Measured on a CPU, whole steps of a 135M model: of 512 slots 32 written, 96 against 134 ms for 8
# rows, 216 against 345 for 32; all of them written, a tie. Of less slots the matrix is as fast.
LONG_ROW = 256


def attend_to_cache(
    q: Float[Array, "b s h k"], stored: Stored, scoring: Scoring, mechanism: Mechanism
) -> Float[Array, "b s h d"]:
    """Attention to what a cache has stored; see `attend`.

    Where `decode_attn_mechanism` says nothing, `autoregressive_decodeattn` reads what is quantized
    or split over devices along its slots, and on a CPU a single query of a long row. Else one query
    has a score matrix of one row, which is "vanilla", and a prompt goes by `attn_mechanism`.

    Raises:
        ConfigError: the mechanism cannot do what the call asks for.
    """
    name = None if mechanism.decode == "auto" else mechanism.decode
    features = scoring.features(q, q, stored.mask_info) | {"cross"}
    if stored.values.shape[-1] != q.shape[-1]:
        features |= {"value_dim"}
    if name is None and (stored.quantized or stored.sharding is not None):
        name = DECODE
    if name is None and follows_context(q, stored, scoring, mechanism):
        name = DECODE
    if name is None:
        keys: Any = stored.keys
        name = "vanilla" if q.shape[1] == 1 else choose(mechanism, q, keys, features)
    check("decode_attn_mechanism", name, features, reads=("projected", "cache"))
    if name in CACHED:
        return CACHED[name](q, stored, scoring, mechanism)
    k, v = stored.k, stored.v
    if isinstance(k, Codes):
        once(
            logger,
            f"decode_attn_mechanism={name!r} reads a copy of the cache that is no longer "
            f"quantized; {DECODE!r} reads the codes",
        )
    k, v = (decode(x, q.dtype) if isinstance(x, Codes) else x for x in (k, v))
    if name != "vanilla":
        k, v = (x.swapaxes(1, 2) for x in (k, v))
        return PROJECTED[name](q, k, v, stored.mask_info, scoring, mechanism)
    return vanilla_attention(
        q,
        k,
        v,
        stored.mask_info,
        scoring,
        mechanism,
        kv_order="bgtk",
        one_by_sum=stored.layout == "leaves",
    )


def follows_context(q: Array, stored: Stored, scoring: Scoring, mechanism: Mechanism) -> bool:
    """Whether one query goes over what is written of a long row, not over all of its slots."""
    slots = stored.keys.shape[-2]
    if q.shape[1] > 1 or not stored.ordered or slots <= LONG_ROW or scoring.dropout > 0:
        return False
    return platform_of(mechanism.config) == "cpu"
