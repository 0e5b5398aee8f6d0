"""Uses of attention kernels: packed rows of training and prompts, and the pages of the engine.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Paged, Projected
from ed_layers.attention.scoring import RelativeBias, Scoring, get_head_indices
from ed_layers.cache.codes import Codes, Format
from ed_layers.cache.protocol import Pages
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.numerics import KernelUse, describe_case

#: Bounds of the sizes of a check: rows of a batch, and tokens of a row.
CHECKED_ROWS, CHECKED_TOKENS = 2, 512


def attend_plainly(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask: jax.Array,
    scoring: Scoring,
    places: tuple[jax.Array, jax.Array],
) -> Float[Array, "b s h d"]:
    """Compute attention from its definition; zeros for a query without visible keys.

    Args:
        mask: which keys a query attends to, bool [b, s, t].
        scoring: settings of the scores; window and chunk are part of the mask.
        places: positions of queries [b, s] and of keys [b, t].
    """
    groups, repeat = k.shape[2], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeat, axis=2), jnp.repeat(v, repeat, axis=2)
    scores, _ = scoring.cap(jnp.einsum("bshk,bthk->bhst", q, k) * scoring.scale)
    if scoring.bias is not None:
        scores = scores + scoring.bias
    if scoring.by_distance:
        bias = scoring.distance_bias(get_head_indices(groups, repeat), *places)
        scores = scores + bias.reshape(bias.shape[0], -1, *bias.shape[3:])
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if scoring.sinks is None else scoring.sinks[None, :, None, None]
    top = top if sinks is None else jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask[:, None], jnp.exp(jnp.where(mask[:, None], scores, 0) - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    return jnp.einsum("bhst,bthd->bshd", weights / jnp.where(total == 0, 1, total), v)


def _bound_scoring(scoring: Scoring, tokens: int) -> tuple[Scoring, dict[str, tuple[int, ...]]]:
    """Return the settings without arrays, and the shapes of the arrays by name."""
    limits: dict[str, Any] = {
        name: limit if limit is None or isinstance(limit, int) else np.int32(max(1, tokens // 3))
        for name, limit in (("window", scoring.window), ("chunk", scoring.chunk))
    }
    shapes: dict[str, tuple[int, ...]] = {}
    if scoring.sinks is not None:
        shapes["sinks"] = scoring.sinks.shape
    if scoring.bias is not None:
        shapes["bias"] = (*scoring.bias.shape[:2], tokens, tokens)
    if scoring.relative is not None:
        shapes["relative"] = scoring.relative.table.shape
    empty = {"sinks": None, "bias": None, "dropout": 0.0, "dropout_key": None}
    return replace(scoring, **limits, **empty), shapes


def _fill_scoring(scoring: Scoring, arrays: dict[str, jax.Array]) -> Scoring:
    arrays = dict(arrays)
    if "relative" in arrays and scoring.relative is not None:
        old = scoring.relative
        table = RelativeBias(arrays.pop("relative"), old.max_distance, causal=old.causal)
        scoring = replace(scoring, relative=table)
    return replace(scoring, **arrays)


def describe_attention(kernel: Kernel[Any], call: Projected | Paged) -> KernelUse | None:
    """Return the use of an attention kernel; None for contiguous caches, which have no program of
    the trainer or the engine."""
    if isinstance(call, Projected):
        return _describe_projected(kernel, call)
    return _describe_paged(kernel, call) if isinstance(call, Paged) else None


def _describe_projected(kernel: Kernel[Any], call: Projected) -> KernelUse:
    (b, s, heads, dim), (t, groups) = call.q.shape, call.k.shape[1:3]
    value_dim, dtype = call.v.shape[-1], np.dtype(call.q.dtype)
    devices = 1 if call.config is None else call.config.mesh.size
    b, is_cross = min(b, max(CHECKED_ROWS, devices)), s != t
    s, t = min(s, CHECKED_TOKENS), min(t, CHECKED_TOKENS)
    scoring, shapes = _bound_scoring(call.scoring, s)
    causal, in_order = call.mask_info.causal, call.mask_info.in_order
    segments = np.ones((b, t), np.int32)
    segments[:, t // 3 :] = 2  # two packed documents
    segments[b // 2 :, t - t // 8 :] = 0  # and padding
    if is_cross:
        segments = np.where(segments > 0, 1, 0).astype(np.int32)

    def build_mask() -> MaskInfo:
        mask = MaskInfo.from_segments(segments, causal)
        if not is_cross:
            return replace(mask, in_order=in_order)
        queries = np.broadcast_to(np.arange(s, dtype=np.int32) + max(0, t - s), (b, s))
        return replace(
            mask,
            q_segment_ids=jnp.ones((b, s), jnp.int32),
            q_index=jnp.asarray(queries),
            in_order=False,
        )

    def split(arrays: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Scoring]:
        extra = dict(zip(shapes, arrays[3:], strict=True))
        return arrays[:3], _fill_scoring(scoring, extra)

    def run(*arrays: jax.Array) -> jax.Array:
        (q, k, v), filled = split(arrays)
        fields = {"q": q, "k": k, "v": v, "mask_info": build_mask(), "scoring": filled}
        return kernel.run(replace(call, **fields))

    def reference(*arrays: jax.Array) -> jax.Array:
        (q, k, v), filled = split(arrays)
        mask = build_mask()
        visible = mask.get_mask(scoring.window, scoring.chunk)
        return attend_plainly(q, k, v, visible, filled, (mask.q_index, mask.kv_index))

    sizes = ((b, s, heads, dim), (b, t, groups, dim), (b, t, groups, value_dim), *shapes.values())
    words = describe_case(
        f"{b} x {s} tokens",
        f"{heads}/{groups} heads of {dim}",
        dtype.name,
        causal=causal,
        cross=is_cross,
        value_dim=None if value_dim == dim else value_dim,
        **_describe_scores(call.scoring),
    )
    return KernelUse(
        f"attention: {kernel.title}",
        words,
        dtype,
        run,
        reference,
        lambda draw: [draw.normal(size=size) for size in sizes],
    )


def _describe_scores(scoring: Scoring) -> dict[str, object]:
    limits = {
        name: limit if limit is None or isinstance(limit, int) else "of the layer"
        for name, limit in (("window", scoring.window), ("chunk", scoring.chunk))
    }
    present = dict.fromkeys(scoring.asked - {"window", "chunk", "dropout"}, True)
    return {**limits, **present}


def _describe_paged(kernel: Kernel[Any], call: Paged) -> KernelUse:
    pool, ragged, (_, heads, dim) = call.pages.pool, call.ragged, call.q.shape
    page_size, groups, ways, width = pool.shape[-4:]
    table = ragged.page_table[call.pages.group]
    longest = max(1, min(table.shape[1] * page_size, CHECKED_TOKENS))
    lengths = np.array([longest, longest // 2 + 1, 1, longest // 3 + 1])[: max(1, table.shape[0])]
    q_lens = np.ones_like(lengths)
    if not ragged.decode_only:
        q_lens = np.minimum(lengths, np.array([longest // 2 + 1, 1, 1, 16])[: len(lengths)])
    tokens, padding = int(q_lens.sum()), 0 if ragged.decode_only else 3
    counts = -(-lengths // page_size)
    ends = np.cumsum(q_lens)
    scoring, shapes = _bound_scoring(call.scoring, longest)
    position = np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, q_lens, strict=True)])
    order = np.random.default_rng(1)
    numbers = order.permutation(int(counts.sum()) + 1).astype(np.int32)
    new_table = np.zeros((len(lengths), int(counts.max())), np.int32)
    for row, start, count in zip(new_table, np.cumsum(counts) - counts, counts, strict=True):
        row[:count] = numbers[start : start + count]
    lead = (2,) if call.pages.at else ()
    group = call.pages.group

    def build_pool() -> Any:
        draw = np.random.default_rng(2)
        shape = (*lead, len(numbers), page_size, groups, ways, width)
        values = jnp.asarray(draw.normal(size=shape), jnp.float32)
        if isinstance(pool, Codes):
            name = "int8" if pool.dtype == jnp.int8 else "fp8"
            scales = pool.scale.shape[-2]
            codes = Format(name, None if scales == 1 else width // scales).encode(
                jnp.moveaxis(values, len(lead) + 1, -2)
            )
            return replace(codes, values=jnp.moveaxis(codes.values, -2, len(lead) + 1))
        return values.astype(pool.dtype)

    def build_ragged() -> RaggedBatch:
        seq = np.pad(np.repeat(np.arange(len(lengths)), q_lens), (0, padding))
        return RaggedBatch(
            cu_q_lens=jnp.asarray([0, *ends], jnp.int32),
            kv_lens=jnp.asarray(lengths, jnp.int32),
            seq_of_token=jnp.asarray(seq, jnp.int32),
            slots={},
            page_table={group: jnp.asarray(new_table)},
            state_slots=jnp.zeros(len(lengths), jnp.int32),
            num_seqs=jnp.int32(len(lengths)),
            decode_only=ragged.decode_only,
        )

    def run(q: jax.Array, *extra: jax.Array) -> jax.Array:
        filled = _fill_scoring(scoring, dict(zip(shapes, extra, strict=True)))
        pages = Pages(build_pool(), (1,) if lead else (), group, call.pages.value_dim)
        return kernel.run(replace(call, q=q, pages=pages, ragged=build_ragged(), scoring=filled))[
            :tokens
        ]

    def reference(q: jax.Array, *extra: jax.Array) -> jax.Array:
        filled = _fill_scoring(scoring, dict(zip(shapes, extra, strict=True)))
        stored = build_pool()
        if isinstance(stored, Codes):
            scale = jnp.moveaxis(stored.scale.astype(q.dtype), -1, len(lead) + 1)
            values = stored.values.astype(q.dtype)
            values *= jnp.repeat(scale, width // scale.shape[-1], axis=-1)
        else:
            values = stored.astype(q.dtype)
        values = values[1] if lead else values
        parts = []
        for i, (length, count) in enumerate(zip(lengths, q_lens, strict=True)):
            at = np.arange(length)
            kv = values[new_table[i, at // page_size], at % page_size][None]
            token_slice = slice(int(ends[i] - count), int(ends[i]))
            index, keys = jnp.asarray(position[token_slice])[None], jnp.asarray(at)[None]
            ones = jnp.ones_like
            mask = MaskInfo(ones(index), ones(keys), index, keys)
            visible = mask.get_mask(scoring.window, scoring.chunk)
            k, v = kv[..., 0, :dim], kv[..., -1, : call.value_dim]
            parts.append(
                attend_plainly(q[token_slice][None], k, v, visible, filled, (index, keys))[0]
            )
        return jnp.concatenate(parts)

    sizes = ((tokens + padding, heads, dim), *shapes.values())
    dtype = np.dtype(call.q.dtype)
    words = describe_case(
        "single tokens" if ragged.decode_only else "prompts and single tokens",
        f"{heads}/{groups} heads of {dim}",
        f"pages of {page_size} in {jnp.dtype(pool.dtype).name}",
        dtype.name,
        value_dim=None if call.value_dim == dim else call.value_dim,
        latent=ways == 1,
        **_describe_scores(call.scoring),
    )
    return KernelUse(
        f"attention: {kernel.title}",
        words,
        dtype,
        run,
        reference,
        lambda draw: [draw.normal(size=size) for size in sizes],
        has_gradient=False,
    )
