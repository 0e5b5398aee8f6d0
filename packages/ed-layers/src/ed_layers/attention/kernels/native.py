"""Attention of the native library on a CPU: prompts and training, contiguous caches, and pages.

Legend: b batch, s query length, h heads, d head dim of values, T flat tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers import dropout
from ed_layers.attention.kernel import Cached, Call, Kernel, Paged, Projected, reasons
from ed_layers.attention.kernels.paged import NAMES
from ed_layers.attention.kernels.softmax import share_beside
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.codes import Codes, Numbers
from ed_layers.devices import mesh_of
from ed_layers.native import attention as native
from ed_layers.native.library import in_use

NUMBERS = (jnp.float32, jnp.bfloat16)
#: Features that the kernels for prompts, for caches and for pages lack.
LACKS = frozenset({"ahead", "bias", "alibi"})
LACKS_CACHE = LACKS | {"dropout"}
LACKS_PAGES = LACKS_CACHE | {"relative"}


def refusals(call: Call) -> list[str]:
    """Return the reasons why the library does not support a call, besides `LACKS`."""
    dtype, softmax = call.q.dtype, jnp.dtype(call.scoring.softmax_dtype)
    mesh = mesh_of(call.config)
    return reasons(
        {
            f"{dtype} (it has float32 and bfloat16)": dtype not in NUMBERS,
            f"a softmax in {softmax} (it has float32)": softmax != jnp.float32,
            "a mesh of several devices": mesh is not None and mesh.size > 1,
        }
    )


def refusals_of_projected(call: Projected) -> list[str]:
    """Return the reasons for prompts and training."""
    same = call.q.dtype == call.k.dtype == call.v.dtype
    return refusals(call) + reasons({"queries of another dtype than keys and values": not same})


def refusals_of_cache(call: Cached) -> list[str]:
    """Return the reasons for a contiguous cache."""
    return refusals(call) + refusals_of_storage(call.stored.keys, call.stored.values)


def refusals_of_pages(call: Paged) -> list[str]:
    """Return the reasons for pages."""
    pool = call.pages.pool
    padded = isinstance(pool, Codes) and {call.q.shape[-1], call.value_dim} != {pool.shape[-1]}
    unfit = reasons({"quantized pages wider than a key or a value": padded})
    return refusals(call) + refusals_of_storage(pool) + unfit


def refusals_of_storage(*stored: Numbers) -> list[str]:
    """Return the unsupported storage formats."""
    known = (*NUMBERS, jnp.int8, jnp.float8_e4m3fn)
    return reasons({f"a cache of {x.dtype}": x.dtype not in known for x in stored})


def prompt_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Compute attention of prompts and training; the library has a backward pass."""
    scoring = call.scoring
    causal = call.mask_info.causal
    rule = native.AttentionRule(scoring.scale, scoring.soft_cap or 0.0, causal, scoring.dropout)
    arrays = (call.q, call.k, call.v, distances_of(scoring))
    rest = (mask_of(call.mask_info), limits_of(scoring), seed_of(scoring))
    out, lse = native.attention(rule, *arrays, *rest)  # type: ignore[misc]
    if scoring.sinks is not None:
        out = (out * share_beside(scoring.sinks, lse)[..., None]).astype(out.dtype)
    return out


def cache_attention(call: Cached) -> Float[Array, "b s h d"]:
    """Compute attention to the slots of a contiguous cache."""
    stored, scoring = call.stored, call.scoring
    (keys, key_scale), (values, value_scale) = (arrays(x) for x in (stored.keys, stored.values))
    return native.attention_to_slots(
        call.q,
        keys,
        values,
        (key_scale, value_scale),
        layer_of(stored.at),
        mask_of(stored.mask_info),
        limits_of(scoring),
        sinks_of(scoring),
        distances_of(scoring),
        scale=scoring.scale,
        soft_cap=scoring.soft_cap or 0.0,
        causal=stored.mask_info.causal,
    )


def page_attention(call: Paged) -> Float[Array, "T h d"]:
    """Compute attention of a flat batch to pages."""
    scoring, ragged = call.scoring, call.ragged
    pool, pool_scale = arrays(call.pages.pool)
    table = ragged.page_table[call.pages.group]
    batch = (ragged.cu_q_lens, ragged.kv_lens, ragged.num_seqs.reshape(1), table)
    return native.attention_to_pages(
        call.q,
        pool,
        pool_scale,
        layer_of(call.pages.at),
        [x.astype(jnp.int32) for x in batch],
        limits_of(scoring),
        sinks_of(scoring),
        value_dim=call.value_dim,
        scale=scoring.scale,
        soft_cap=scoring.soft_cap or 0.0,
    )


def mask_of(info: MaskInfo) -> native.Mask:
    """Return the mask in the library's format."""
    ids = (info.q_segment_ids, info.q_index, info.kv_segment_ids, info.kv_index)
    return [x.astype(jnp.int32) for x in ids]


def limits_of(scoring: Scoring) -> Int[Array, " 2"]:
    """Return window and chunk; 0 = no limit."""
    limits = (scoring.window, scoring.chunk)
    return jnp.stack([jnp.asarray(0 if x is None else x, jnp.int32) for x in limits])


def sinks_of(scoring: Scoring) -> Float[Array, " h"]:
    """Return the sinks; an empty array if the model has none."""
    return jnp.zeros((0,)) if scoring.sinks is None else scoring.sinks.astype(jnp.float32)


def distances_of(scoring: Scoring) -> Float[Array, "h m"]:
    """Return the bias by distance; an empty array if the model has none."""
    relative = scoring.relative
    return native.no_distances() if relative is None else relative.by_distance()


def seed_of(scoring: Scoring) -> Int[Array, " n"]:
    """Return the seed of dropout; an empty array without dropout."""
    if scoring.dropout_key is None or scoring.dropout == 0:
        return jnp.zeros((0,), jnp.int32)
    return jax.lax.bitcast_convert_type(dropout.seed_of(scoring.dropout_key), jnp.int32)


def layer_of(at: tuple[int | jax.Array, ...]) -> Int[Array, " 1"]:
    """Return the index of the layer in a stack."""
    return jnp.asarray(at[0] if at else 0, jnp.int32).reshape(1)


def arrays(stored: Numbers) -> tuple[jax.Array, jax.Array]:
    """Return numbers, or codes and scales, in the stored shape: XLA would copy a reshaped array."""
    if isinstance(stored, Codes):
        return stored.values, stored.scale
    return stored, native.no_scale()


def _kernel(mechanism, reads, title, run, refuses, lacks, auto_from: int | None = 1):
    return Kernel(
        mechanism,
        reads,
        f"native, {title}",
        run,
        platform="cpu",
        language="native",
        lacks=lacks,
        refuses=refuses,
        available=in_use,
        needs="the native library",
        auto_from=auto_from,
    )


KERNELS = (
    _kernel("flash_attn2", "projected", "blocks", prompt_attention, refusals_of_projected, LACKS),
    _kernel(
        "autoregressive_decodeattn",
        "cache",
        "slots",
        cache_attention,
        refusals_of_cache,
        LACKS_CACHE,
    ),
    *(
        _kernel(name, "pages", "pages", page_attention, refusals_of_pages, LACKS_PAGES)
        for name in NAMES
    ),
)
