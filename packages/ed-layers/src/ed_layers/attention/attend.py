"""`attend`: the one door to attention.

It checks a call, lets `choose` name the mechanism where the configuration leaves it open, and lets
`registry.run` compute it by the first kernel that takes it.

Legend: b batch, s query length, t key length or slots, h heads, g kv heads, k head dim of queries
and keys, d head dim of values.
"""

from __future__ import annotations

from itertools import product
from typing import TypeVar

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.attention.kernel import Cached, Paged, Projected
from ed_layers.attention.mechanism import Mechanism, check, choose, choose_for_cache
from ed_layers.attention.registry import run
from ed_layers.attention.scoring import Alibi, Limit, RelativeBias, Scoring
from ed_layers.cache.protocol import Cache, Layer
from ed_layers.cache.ragged import RaggedBatch

CacheT = TypeVar("CacheT", bound=Cache | None)


def attend(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"] | None,
    v: Float[Array, "b t g d"] | None,
    mask_info: MaskInfo | None,
    *,
    cache: CacheT = None,
    layer: Layer = 0,
    ragged: RaggedBatch | None = None,
    group: str = "full",
    window: Limit | None = None,
    chunk: Limit | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "#b #h s t"] | None = None,
    alibi: Alibi | None = None,
    relative: RelativeBias | None = None,
    dropout_key: jax.Array | None = None,
    mechanism: Mechanism,
) -> tuple[Float[Array, "b s h d"], CacheT]:
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
        alibi: a bias by distance (MPT, Falcon).
        relative: a trained bias by distance (T5).
        dropout_key: drops attention weights; None means deterministic.
        mechanism: resolved when the model was built.

    Returns:
        [b, s, h, d] in the dtype of `q` (a query that may attend to nothing gets zeros), and the
        cache.

    Raises:
        ConfigError: shapes do not fit each other, or the mechanism cannot do what the call asks
            for.
    """
    check_shapes(q, k, v)
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
        alibi=alibi,
        relative=relative,
        dropout=0.0 if dropout_key is None else mechanism.dropout,
        dropout_key=dropout_key,
        softmax_dtype=mechanism.softmax_dtype,
    )
    config = mechanism.config
    kv = None if k is None or v is None else (k, v)
    demand(
        cache is None or 0 not in q.shape[:2],
        f"q is {list(q.shape)}: a step with a cache needs a row and a token at least; leave out "
        "steps without tokens",
    )
    if ragged is not None:
        if cache is None:
            raise ConfigError("ragged describes tokens over a cache of pages: give the cache, too")
        cache, pages = cache.update(layer, kv, ragged=ragged, group=group)
        call = Paged(
            name=mechanism.pages,
            q=q[0],
            scoring=scoring,
            pages=pages,
            ragged=pages.ragged or ragged,
            config=config,
        )
        check_scoring(scoring, q.shape[2], pages.pool.shape[-3])
        check("decode_attn_mechanism", call.name, call.features, reads=("pages",))
        return run(mechanism.named(call, call.name))[None].astype(out_dtype), cache
    if mask_info is None:
        raise ConfigError("mask_info is None: only a ragged batch has no mask")
    if cache is not None:
        cache, stored = cache.update(layer, kv, mask_info=mask_info, group=group)
        call = Cached(name="auto", q=q, scoring=scoring, stored=stored, config=config)
        groups, slots = stored.keys.shape[-3:-1]
        check_scoring(scoring, q.shape[2], groups, *q.shape[:2], slots)
        name = choose_for_cache(mechanism, call)
        check("decode_attn_mechanism", name, call.features, reads=("projected", "cache"))
        return run(mechanism.named(call, name)).astype(out_dtype), cache
    if k is None or v is None:
        raise ConfigError("k and v are None: only a layer that reads a cache has none of its own")
    check_scoring(scoring, q.shape[2], k.shape[2], *q.shape[:2], k.shape[1])
    check_mask(mask_info, q, k)
    # The weight of padding is zero, and so is its part of a sum unless it holds an inf or a NaN.
    call = Projected(
        name="auto",
        q=zero_padding(q, mask_info.q_segment_ids),
        k=zero_padding(k, mask_info.kv_segment_ids),
        v=zero_padding(v, mask_info.kv_segment_ids),
        mask_info=mask_info,
        scoring=scoring,
        config=config,
    )
    name = choose(mechanism, call)
    check("attn_mechanism", name, call.features, reads=("projected",))
    if 0 in (*q.shape[:2], k.shape[1]):  # no row, no query or no key
        return jnp.zeros((*q.shape[:3], v.shape[-1]), out_dtype), cache
    return run(mechanism.named(call, name)).astype(out_dtype), cache


def zero_padding(x: Float[Array, "b n h k"], segment_ids: Int[Array, "b n"]) -> jax.Array:
    """Zeros where a place is padding; XLA fuses it into what makes `x` or reads it."""
    return jnp.where((segment_ids != 0)[:, :, None, None], x, 0)


def demand(holds: bool, message: str) -> None:
    """Raise ConfigError unless a condition holds."""
    if not holds:
        raise ConfigError(message)


def check_shapes(q: jax.Array, k: jax.Array | None, v: jax.Array | None) -> None:
    """Raise ConfigError unless q, k and v are four-dimensional and fit each other."""
    shapes = {name: x.shape for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    four = all(len(shape) == 4 for shape in shapes.values())
    demand(four, f"{sizes}: attention takes [batch, length, heads, head dim]")
    some = all(0 not in shape[2:] for shape in shapes.values())
    demand(some, f"{sizes}: attention needs a head at least, and a head dim above 0")
    demand((k is None) == (v is None), f"{sizes}: give both k and v, or neither")
    if k is None or v is None:
        return
    demand(
        k.shape[:3] == v.shape[:3] and k.shape[0] == q.shape[0],
        f"{sizes}: k and v should agree in batch, length and heads, and q with them in batch",
    )
    demand(k.shape[3] == q.shape[3], f"{sizes}: q and k should have the same head dim")


def check_scoring(scoring: Scoring, heads: int, groups: int, *lengths: int) -> None:
    """Raise ConfigError unless key heads, sinks, slopes and bias fit the query heads.

    Args:
        lengths: b, s and t of a bias; none for pages, which take no bias.
    """
    demand(
        heads % groups == 0,
        f"{heads} query heads over {groups} key heads: each key head should serve equally many "
        f"query heads, so their number is a multiple of {groups}",
    )
    if (sinks := scoring.sinks) is not None:
        message = f"sinks are {list(sinks.shape)}: there should be one for each of {heads} heads"
        demand(sinks.shape == (heads,), message)
    if (alibi := scoring.alibi) is not None:
        message = (
            f"ALiBi has {len(alibi.slopes)} slopes: there should be one for each of {heads} heads"
        )
        demand(len(alibi.slopes) == heads, message)
    if (relative := scoring.relative) is not None:
        message = (
            f"the table of relative positions is {list(relative.table.shape)}: it should have a "
            f"column for each of {heads} heads"
        )
        demand(relative.table.shape[1:] == (heads,), message)
    if (bias := scoring.bias) is not None and lengths:
        b, s, t = lengths
        demand(
            bias.shape in [(*lead, s, t) for lead in product((1, b), (1, heads))],
            f"the bias is {list(bias.shape)}: it should be [{b} or 1, {heads} or 1, {s}, {t}]",
        )


def check_mask(mask_info: MaskInfo, q: jax.Array, k: jax.Array) -> None:
    """Raise ConfigError unless a mask describes these queries and keys."""
    queries, keys = mask_info.q_segment_ids.shape, mask_info.kv_segment_ids.shape
    demand(
        (queries, keys) == (q.shape[:2], k.shape[:2]),
        f"the mask is of queries {list(queries)} and keys {list(keys)}, [batch, length], but q is "
        f"{list(q.shape)} and k {list(k.shape)}: make it of the same rows",
    )
