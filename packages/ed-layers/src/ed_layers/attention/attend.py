"""`attend`: the one door to attention.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.attention.cached import attend_to_cache
from ed_layers.attention.choose import choose
from ed_layers.attention.dispatch import PAGED, PROJECTED
from ed_layers.attention.mechanism import Mechanism, check
from ed_layers.attention.scoring import Limit, Scoring
from ed_layers.cache.protocol import Layer
from ed_layers.cache.ragged import RaggedBatch


def attend(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"] | None,
    v: Float[Array, "b t g d"] | None,
    mask_info: MaskInfo | None,
    *,
    cache: Any = None,
    layer: Layer = 0,
    ragged: RaggedBatch | None = None,
    group: str = "full",
    window: Limit | None = None,
    chunk: Limit | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "#b #h s t"] | None = None,
    dropout_key: jax.Array | None = None,
    mechanism: Mechanism,
) -> tuple[Float[Array, "b s h d"], Any]:
    """Scaled dot-product attention with grouped key/value heads.

    Args:
        q, k, v: this step's queries, keys and values; `h` is a multiple of `g`. k and v are None
            where a cross-attention layer reads only what its cache holds.
        mask_info: who may attend to whom; None only with `ragged`.
        cache: None in training; otherwise k and v are stored in it and attention reads from it.
        layer: which layer of the model.
        ragged: the flat batch of a serving step (then b = 1, s = T).
        group: which of the cache's groups the layer belongs to: "full", "window" or "cross"; a
            cache that stores all layers alike has one.
        window: attend to the last `window` tokens, oneself included (Hugging Face's
            `sliding_window`). An int, or a traced scalar in which 0 = no limit.
        chunk: attend within blocks of `chunk` positions (Llama 4). As `window`.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2).
        sinks: one logit per head that takes part in the softmax and is dropped (gpt-oss).
        scale: factor on the scores; `k ** -0.5` if None.
        bias: added to the scores, after the soft cap.
        dropout_key: drops attention weights; None means deterministic.
        mechanism: resolved when the model was built.

    Returns:
        [b, s, h, d] in the dtype of `q` (a query that may attend to nothing gets zeros), and the
        cache.

    Raises:
        ConfigError: the mechanism cannot do what the call asks for.
    """
    out_dtype = q.dtype
    if mechanism.dtype is not None:
        q, k, v = jax.tree.map(lambda x: x.astype(mechanism.dtype), (q, k, v))
    scoring = Scoring(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        sinks=sinks,
        bias=bias,
        dropout=0.0 if dropout_key is None else mechanism.dropout,
        dropout_key=dropout_key,
        softmax_dtype=mechanism.softmax_dtype,
    )
    kv = None if k is None else (k, v)
    if ragged is not None:
        cache, pages = cache.update(layer, kv, ragged=ragged, group=group)
        needed = scoring.features(q, q if v is None else v, MaskInfo.full(1, 1)) - {"cross"}
        check("decode_attn_mechanism", mechanism.pages, needed, reads=("pages",))
        out = PAGED[mechanism.pages](q[0], pages, ragged, scoring, mechanism)[None]
        return out.astype(out_dtype), cache
    assert mask_info is not None, "a batch that is not ragged has a mask"
    if cache is not None:
        cache, stored = cache.update(layer, kv, mask_info=mask_info, group=group)
        return attend_to_cache(q, stored, scoring, mechanism).astype(out_dtype), cache
    assert k is not None, "without a cache there are keys"
    assert v is not None, "without a cache there are values"
    features = scoring.features(q, v, mask_info)
    name = choose(mechanism, q, k, features)
    check("attn_mechanism", name, features, reads=("projected",))
    # The weight of padding is zero, and so is its part of a sum unless it holds an inf or a NaN.
    q = zero_padding(q, mask_info.q_segment_ids)
    k, v = (zero_padding(x, mask_info.kv_segment_ids) for x in (k, v))
    out = PROJECTED[name](q, k, v, mask_info, scoring, mechanism)
    return out.astype(out_dtype), None


def zero_padding(x: Float[Array, "b n h k"], segment_ids: Int[Array, "b n"]) -> jax.Array:
    """Zeros where a place is padding; XLA fuses it into what makes `x` or reads it."""
    return jnp.where((segment_ids != 0)[:, :, None, None], x, 0)
