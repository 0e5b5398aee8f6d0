"""`attend`: the function through which all attention passes.

`attend` validates a call, determines the mechanism, and runs the first kernel that accepts the call
(`kernels.run`).

Legend: b batch, s query length, t key length or slots, h heads, g kv heads, k head dim of queries
and keys, d head dim of values.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.attention.kernel import Cached, Paged, Projected
from ed_layers.attention.kernels import run_chosen_kernel
from ed_layers.attention.mechanism import Mechanism, check_mechanism, choose, choose_for_cache
from ed_layers.attention.scoring import Alibi, RelativeBias, Scoring, WindowLimit
from ed_layers.cache.protocol import Cache, KeysWriter, Layer, Pages, StoredLayer
from ed_layers.cache.ragged import RaggedBatch


class QueriesWriter(KeysWriter, Protocol):
    """A kernel that computes queries [T, h, k] with the keys and values that it writes."""

    queries: jax.Array


CacheT = TypeVar("CacheT", bound=Cache | None)


class AttentionOutput(NamedTuple, Generic[CacheT]):
    """The result of `attend`.

    Attributes:
        attention_outputs: [b, s, h, d], in the dtype of the queries; zero for a query without
            visible keys.
        cache_view: the cache with the keys and values of the step, or None.
    """

    attention_outputs: Float[Array, "b s h d"]
    cache_view: CacheT


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
    window: WindowLimit | None = None,
    chunk: WindowLimit | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "#b #h s t"] | None = None,
    alibi: Alibi | None = None,
    relative: RelativeBias | None = None,
    dropout_key: jax.Array | None = None,
    mechanism: Mechanism,
) -> AttentionOutput[CacheT]:
    """Compute scaled dot-product attention with grouped key/value heads.

    Args:
        q, k, v: queries, keys and values of this step; `h` is a multiple of `g`. k and v are None
            if a cross-attention layer reads keys and values that an earlier step stored.
        mask_info: the attention mask; None only with `ragged`.
        cache: None in training; otherwise k and v are stored in the cache, and attention reads the
            stored keys and values.
        layer: number of the layer in the model.
        ragged: the flat batch of a serving step (then b = 1, s = T).
        group: cache group of the layer: "full", "window" or "cross".
        window: a token attends to the last `window` tokens, including itself (Hugging Face's
            `sliding_window`). An int, or a traced scalar in which 0 = no limit.
        chunk: a token attends within its block of `chunk` positions (Llama 4). An int or a traced
            scalar, as `window`.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2).
        sinks: one logit per head that the softmax includes, without a value (gpt-oss).
        scale: factor on the scores; None = `k ** -0.5`.
        bias: added to the scores after the soft cap.
        alibi: a bias by distance (MPT, Falcon).
        relative: a trained bias by distance (T5).
        dropout_key: random key that drops attention weights; None = deterministic.
        mechanism: the mechanism, resolved when the model was built.

    Returns:
        The output and the cache, as a pair with names.

    Raises:
        ConfigError: shapes are inconsistent, or the mechanism lacks a feature of the call.
    """
    check_shapes(q, k, v)
    scoring = Scoring(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        sinks=sinks,
        bias=bias,
        alibi=alibi,
        relative=relative,
        dropout_key=dropout_key,
    )
    pair = attend_with_scoring(
        *(q, k, v, mask_info, scoring),
        cache=cache,
        layer=layer,
        ragged=ragged,
        group=group,
        mechanism=mechanism,
    )
    return AttentionOutput(*pair)


def attend_with_scoring(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"] | None,
    v: Float[Array, "b t g d"] | None,
    mask_info: MaskInfo | None,
    scoring: Scoring,
    *,
    cache: CacheT,
    layer: Layer,
    ragged: RaggedBatch | None,
    group: str,
    mechanism: Mechanism,
) -> tuple[Float[Array, "b s h d"], CacheT]:
    """Compute `attend` for consistent shapes, with the settings of the scores as a record.

    The mechanism sets the dtype of the softmax, and the dropout rate if there is a `dropout_key`.
    """
    out_dtype = q.dtype
    if mechanism.dtype is not None:
        q, k, v = jax.tree.map(lambda x: x.astype(mechanism.dtype), (q, k, v))
    scoring = replace(
        scoring,
        dropout=0.0 if scoring.dropout_key is None else mechanism.dropout,
        softmax_dtype=mechanism.softmax_dtype,
    )
    config = mechanism.config
    kv = None if k is None or v is None else (k, v)
    demand(
        cache is None or 0 not in q.shape[:2],
        f"q has shape {list(q.shape)}: a step with a cache needs at least one row and one token; "
        "leave out steps without tokens",
    )
    if ragged is not None:
        if cache is None:
            raise ConfigError("ragged requires the cache of pages: pass the cache, too")
        cache, pages = cache.update(layer, kv, ragged=ragged, group=group)
        out = attend_to_pages(q[0], pages, scoring, ragged, mechanism)
        return out[None].astype(out_dtype), cache
    if mask_info is None:
        raise ConfigError("mask_info is None: only a ragged batch may omit the mask")
    stored: StoredLayer | Pages | None = None  # None: attention reads the keys of the step
    if cache is not None:
        cache, stored = cache.update(layer, kv, mask_info=mask_info, group=group)
    if stored is not None:
        assert isinstance(stored, StoredLayer), "rows with a mask read a contiguous cache"
        if mask_info.ahead is not None:  # the masks of cache groups have no images
            mask = replace(stored.mask_info, ahead=mask_info.ahead)
            stored = replace(stored, mask_info=mask)
        call = Cached(name="auto", q=q, scoring=scoring, stored=stored, config=config)
        groups, slots = stored.keys.shape[-3:-1]
        check_scoring(scoring, q.shape[2], groups, *q.shape[:2], slots)
        name = choose_for_cache(mechanism, call)
        check_mechanism("decode_attn_mechanism", name, call.features, reads=("projected", "cache"))
        return run_chosen_kernel(mechanism.replace_mechanism(call, name)).astype(out_dtype), cache
    if k is None or v is None:
        raise ConfigError("k and v are None: only a layer that reads a cache may omit them")
    check_scoring(scoring, q.shape[2], k.shape[2], *q.shape[:2], k.shape[1])
    check_mask(mask_info, q, k)
    # Padding has weight zero, but inf or NaN in padding would still turn sums into NaN.
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
    check_mechanism("attn_mechanism", name, call.features, reads=("projected",))
    if 0 in (*q.shape[:2], k.shape[1]):  # no row, no query or no key
        return jnp.zeros((*q.shape[:3], v.shape[-1]), out_dtype), cache
    return run_chosen_kernel(mechanism.replace_mechanism(call, name)).astype(out_dtype), cache


def attend_and_write(
    writer: QueriesWriter,
    scoring: Scoring,
    *,
    cache: CacheT,
    layer: Layer,
    ragged: RaggedBatch,
    group: str,
    mechanism: Mechanism,
) -> tuple[Float[Array, "1 T h d"], CacheT]:
    """Compute `attend_with_scoring` for a flat batch whose queries, keys and values a kernel
    computes while it writes the keys and values into the cache.

    Args:
        writer: the kernel.
    """
    assert cache is not None, "a flat batch has a cache of pages"
    scoring = replace(scoring, dropout=0.0, softmax_dtype=mechanism.softmax_dtype)
    cache, pages = cache.update(layer, writer, ragged=ragged, group=group)
    out = attend_to_pages(writer.queries, pages, scoring, ragged, mechanism)
    return out[None], cache


def attend_to_pages(
    q: Float[Array, "T h k"],
    pages: StoredLayer | Pages,
    scoring: Scoring,
    ragged: RaggedBatch,
    mechanism: Mechanism,
) -> Float[Array, "T h d"]:
    """Run the mechanism on the pages of a layer."""
    assert isinstance(pages, Pages), "a flat batch reads pages"
    call = Paged(
        name=mechanism.pages,
        q=q,
        scoring=scoring,
        pages=pages,
        ragged=pages.ragged or ragged,
        config=mechanism.config,
    )
    check_scoring(scoring, q.shape[1], pages.pool.shape[-3])
    check_mechanism("decode_attn_mechanism", call.name, call.features, reads=("pages",))
    return run_chosen_kernel(mechanism.replace_mechanism(call, call.name))


def zero_padding(x: Float[Array, "b n h k"], segment_ids: Int[Array, "b n"]) -> jax.Array:
    """Set padding to zero; XLA fuses this operation with its neighbors."""
    return jnp.where((segment_ids != 0)[:, :, None, None], x, 0)


def demand(holds: bool, message: str) -> None:
    """Raise ConfigError unless a condition holds."""
    if not holds:
        raise ConfigError(message)


def check_shapes(q: jax.Array, k: jax.Array | None, v: jax.Array | None) -> None:
    """Raise ConfigError unless q, k and v are four-dimensional and consistent."""
    shapes = {name: x.shape for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    four = all(len(shape) == 4 for shape in shapes.values())
    demand(four, f"{sizes}: the shapes must be [batch, length, heads, head dim]")
    is_nonempty = all(0 not in shape[2:] for shape in shapes.values())
    demand(is_nonempty, f"{sizes}: the number of heads and the head dim must be at least 1")
    demand((k is None) == (v is None), f"{sizes}: pass both k and v, or neither")
    if k is None or v is None:
        return
    demand(
        k.shape[:3] == v.shape[:3] and k.shape[0] == q.shape[0],
        f"{sizes}: k and v must have equal batch size, length and heads, and q the same batch size",
    )
    demand(k.shape[3] == q.shape[3], f"{sizes}: q and k must have the same head dim")


def check_scoring(scoring: Scoring, heads: int, groups: int, *lengths: int) -> None:
    """Raise ConfigError unless key heads, sinks, slopes and bias match the query heads.

    Args:
        scoring: the settings of the scores.
        heads, groups: number of query heads and of key heads.
        lengths: b, s and t of a bias; omitted for pages, which support no bias.
    """
    demand(
        heads % groups == 0,
        f"{heads} query heads and {groups} key heads: the number of query heads must be a multiple "
        f"of {groups}",
    )
    if (sinks := scoring.sinks) is not None:
        message = (
            f"sinks has shape {list(sinks.shape)}: there must be one for each of {heads} heads"
        )
        demand(sinks.shape == (heads,), message)
    if (alibi := scoring.alibi) is not None:
        message = (
            f"ALiBi has {len(alibi.slopes)} slopes: there must be one for each of {heads} heads"
        )
        demand(len(alibi.slopes) == heads, message)
    if (relative := scoring.relative) is not None:
        message = (
            f"the table of relative positions has shape {list(relative.table.shape)}: it must have "
            f"one column for each of {heads} heads"
        )
        demand(relative.table.shape[1:] == (heads,), message)
    if (bias := scoring.bias) is not None and lengths:
        b, s, t = lengths
        demand(
            bias.shape in [(*lead, s, t) for lead in product((1, b), (1, heads))],
            f"the bias has shape {list(bias.shape)}: it must be [{b} or 1, {heads} or 1, {s}, {t}]",
        )


def check_mask(mask_info: MaskInfo, q: jax.Array, k: jax.Array) -> None:
    """Raise ConfigError unless a mask has the shapes of the queries and keys."""
    queries, keys = mask_info.q_segment_ids.shape, mask_info.kv_segment_ids.shape
    demand(
        (queries, keys) == (q.shape[:2], k.shape[:2]),
        f"the mask describes queries {list(queries)} and keys {list(keys)}, [batch, length], but q "
        f"has shape {list(q.shape)} and k {list(k.shape)}: batch sizes and lengths must be equal",
    )
