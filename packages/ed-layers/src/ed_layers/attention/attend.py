"""`attend`: the one door to attention.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim, T flat tokens.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.blockwise import blockwise_attention
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.paged import paged_attention
from ed_layers.attention.vanilla import vanilla_attention
from ed_layers.cache.protocol import Layer
from ed_layers.cache.ragged import RaggedBatch

CacheT = TypeVar("CacheT")


def attend(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    mask_info: MaskInfo | None,
    *,
    cache: Any = None,
    layer: Layer = 0,
    ragged: RaggedBatch | None = None,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "b h s t"] | None = None,
    dropout_key: jax.Array | None = None,
    mechanism: Mechanism,
) -> tuple[Float[Array, "b s h k"], Any]:
    """Scaled dot-product attention with grouped key/value heads.

    Args:
        q, k, v: this step's queries, keys and values; `h` is a multiple of `g`.
        mask_info: who may attend to whom; None only with `ragged`.
        cache: None in training; otherwise k and v are stored in it and attention reads from it.
        layer: which layer of the cache.
        ragged: the flat batch of a serving step (then b = 1, s = T).
        window: attend to the last `window` tokens, oneself included (Hugging Face's
            `sliding_window`).
        chunk: attend within blocks of `chunk` positions (Llama 4).
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2).
        sinks: one logit per head that takes part in the softmax and is dropped (gpt-oss).
        scale: factor on the scores; `k ** -0.5` if None.
        bias: added to the scores.
        dropout_key: drops attention weights; None means deterministic.
        mechanism: resolved when the model was built.

    Returns:
        [b, s, h, k] in the dtype of `q` (a query that may attend to nothing gets zeros), and the
        cache.
    """
    out_dtype = q.dtype
    if mechanism.dtype is not None:
        q, k, v = (x.astype(mechanism.dtype) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    masking: dict[str, Any] = {"window": window, "chunk": chunk}

    if ragged is not None:
        refuse_in_pages(sinks=sinks, bias=bias)
        cache = cache.write(layer, (k, v), ragged)
        out = paged_attention(
            q[0],
            cache.read(layer, ragged),
            ragged,
            group=cache.group,
            scale=scale,
            soft_cap=soft_cap,
            softmax_dtype=mechanism.softmax_dtype,
            **masking,
        )[None]
        return out.astype(out_dtype), cache

    assert mask_info is not None, "a batch that is not ragged has a mask"
    if cache is not None:
        cache = cache.write(layer, (k, v))
        k, v = cache.read(layer)
    use_dropout = mechanism.dropout > 0 and dropout_key is not None
    asked = frozenset(
        name for name, used in (("sinks", sinks is not None), ("bias", bias is not None)) if used
    ) | ({"dropout"} if use_dropout else frozenset())
    name = mechanism.pick(q.shape[1], asked, cached=cache is not None)
    if name == "blockwise":
        if cache is not None:
            k, v = (x.swapaxes(1, 2) for x in (k, v))
        out = blockwise_attention(
            q,
            k,
            v,
            mask_info,
            scale=scale,
            soft_cap=soft_cap,
            block_q=mechanism.block_q,
            block_k=mechanism.block_k,
            softmax_dtype=mechanism.softmax_dtype,
            **masking,
        )
    else:
        out = vanilla_attention(
            q,
            k,
            v,
            mask_info,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            bias=bias,
            dropout=mechanism.dropout if use_dropout else 0.0,
            dropout_key=dropout_key,
            softmax_dtype=mechanism.softmax_dtype,
            kv_order="bgtk" if cache is not None else "btgk",
            one_by_sum=cache is not None and cache.layout == "leaves",
            **masking,
        )
    return out.astype(out_dtype), cache


def refuse_in_pages(**unsupported: Any) -> None:
    """Paged attention has no sinks and no bias; a model that needs them must not lose them."""
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"attention over pages cannot do {name!r}; serve it with generate()")
