"""Attention of the native library on a CPU: prompts and training, contiguous caches, and pages.

Legend: b batch, s query length, h heads, d head dim of values, T flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ed_layers import dropout, fixed_order
from ed_layers.attention.kernel import Cached, Call, Kernel, Paged, Projected, reasons
from ed_layers.attention.kernels.paged import PAGED_NAMES
from ed_layers.attention.kernels.softmax import share_beside
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.codes import Codes, Numbers
from ed_layers.devices import AxisNames, get_mesh, get_mesh_axes, over_devices
from ed_layers.native import attention as native
from ed_layers.native.library import in_use
from ed_layers.native.products import NUMBERS

#: Features that the kernels for prompts lack, and those for caches and pages.
_LACKS = frozenset({"ahead", "bias"})
LACKS_STORED = _LACKS | {"dropout"}


def _refusals(call: Call, stored: Numbers | None = None) -> list[str]:
    """Return the reasons why the library does not support a call, besides `_LACKS`."""
    dtype, softmax = call.q.dtype, jnp.dtype(call.scoring.softmax_dtype)
    mesh = get_mesh(call.config)
    is_distributed = mesh is not None and mesh.size > 1
    rounded = call.scoring.alibi and call.scoring.alibi.dtype
    return reasons(
        {
            f"{dtype} (it has float32 and bfloat16)": dtype not in NUMBERS,
            f"a softmax in {softmax} (it has float32)": softmax != jnp.float32,
            f"ALiBi rounded to {rounded} (it has bfloat16)": rounded not in (None, "bfloat16"),
            "a mesh of several devices": is_distributed and not fixed_order.active(),
            "a quantized cache on several devices": is_distributed and isinstance(stored, Codes),
        }
    )


def refusals_of_projected(call: Projected) -> list[str]:
    """Return the reasons for prompts and training."""
    same = call.q.dtype == call.k.dtype == call.v.dtype
    return _refusals(call) + reasons({"queries of another dtype than keys and values": not same})


def refusals_of_cache(call: Cached) -> list[str]:
    """Return the reasons for a contiguous cache."""
    stored = call.stored
    return _refusals(call, stored.keys) + refusals_of_storage(stored.keys, stored.values)


def refusals_of_pages(call: Paged) -> list[str]:
    """Return the reasons for pages."""
    pool = call.pages.pool
    padded = isinstance(pool, Codes) and {call.q.shape[-1], call.value_dim} != {pool.shape[-1]}
    unfit = reasons({"quantized pages wider than a key or a value": padded})
    return _refusals(call, pool) + refusals_of_storage(pool) + unfit


def refusals_of_storage(*stored: Numbers) -> list[str]:
    """Return the unsupported storage formats."""
    supported_dtypes = (*NUMBERS, jnp.int8, jnp.float8_e4m3fn)
    return reasons({f"a cache of {x.dtype}": x.dtype not in supported_dtypes for x in stored})


def attend_prompt(call: Projected) -> Float[Array, "b s h d"]:
    """Compute attention of prompts and training; the library has a backward pass."""
    scoring = call.scoring
    rule = build_rule(scoring, causal=call.mask_info.causal)
    limits, seed = get_limits(scoring), _get_seed(scoring)

    def attend_on_device(q, k, v, mask, heads):
        biases, sinks = heads
        out, lse = native.attend_natively(rule, q, k, v, biases, mask, limits, seed)  # type: ignore[misc]
        if sinks is not None:
            out = (out * share_beside(sinks, lse)[..., None]).astype(out.dtype)
            if rule.fixed:  # caches include the sink in the sum, which has other bits
                exact = jax.lax.stop_gradient((q, k, v, sinks.astype(jnp.float32), biases))
                out = fixed_order.replace_gradient(attend_to_slots(*exact, mask), out)
        return out

    def attend_to_slots(q, k, v, sinks, biases, mask):
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        return native.attend_slots(
            *(rule, q, k, v, (native.no_scale(), native.no_scale()), get_layer_index(())),
            *(mask, limits, sinks, biases),
        )

    heads = (get_biases(scoring), scoring.sinks)
    return over_devices(
        attend_on_device, call.config, call.q, call.k, call.v, build_mask(call.mask_info), heads
    )


def cache_attention(call: Cached) -> Float[Array, "b s h d"]:
    """Compute attention to the slots of a contiguous cache."""
    stored, scoring = call.stored, call.scoring
    (keys, key_scale), (values, value_scale) = (_arrays(x) for x in (stored.keys, stored.values))
    rule = build_rule(scoring, causal=stored.mask_info.causal)
    kernel = partial(native.attend_slots, rule)
    batch, heads = row_axes(call), _head_axes(call, stored.keys.shape[-3])
    q_spec, row_spec = P(batch, None, heads), P(batch)
    cache_spec = P(*(None,) * (keys.ndim - 4), batch, heads)
    mask = tuple(build_mask(stored.mask_info))
    specs = (q_spec, cache_spec, cache_spec, P(), P(), row_spec, P(), P(heads), P(heads))
    return _on_mesh(kernel, call, specs, q_spec)(
        call.q,
        keys,
        values,
        (key_scale, value_scale),
        get_layer_index(stored.at),
        mask,
        get_limits(scoring),
        get_sinks(scoring),
        get_biases(scoring),
    )


def page_attention(call: Paged) -> Float[Array, "T h d"]:
    """Compute attention of a flat batch to pages."""
    scoring, ragged = call.scoring, call.ragged
    pool, pool_scale = _arrays(call.pages.pool)
    table = ragged.page_table[call.pages.group]
    batch = (ragged.cu_q_lens, ragged.kv_lens, ragged.num_seqs.reshape(1), table)
    rule = build_rule(scoring, causal=True)
    kernel = partial(native.attention_to_pages, rule, value_dim=call.value_dim)
    heads = _head_axes(call, pool.shape[-3])
    q_spec, pool_spec = P(None, heads), P(*(None,) * (pool.ndim - 3), heads)
    specs = (q_spec, pool_spec, P(), P(), P(), P(), P(heads), P(heads))
    return _on_mesh(kernel, call, specs, q_spec)(
        call.q,
        pool,
        pool_scale,
        get_layer_index(call.pages.at),
        tuple(x.astype(jnp.int32) for x in batch),
        get_limits(scoring),
        get_sinks(scoring),
        get_biases(scoring),
    )


def _on_mesh(
    kernel: Callable[..., jax.Array], call: Call, arguments: tuple[P, ...], result: P
) -> Callable[..., jax.Array]:
    """Return a kernel that each device of a mesh runs on its rows and heads."""
    mesh = get_mesh(call.config)
    if mesh is None or mesh.size == 1:
        return kernel
    return jax.shard_map(kernel, mesh=mesh, in_specs=arguments, out_specs=result, check_vma=False)


def row_axes(call: Call) -> AxisNames | None:
    """Return the mesh axes that split the rows of a batch."""
    if call.config is None:
        return None
    return get_mesh_axes(call.config, ("batch",), call.q.shape[:1], "decode")[0]


def _head_axes(call: Call, groups: int) -> AxisNames | None:
    """Return the mesh axes that split the heads of queries, and also those of keys."""
    if call.config is None:
        return None
    return get_mesh_axes(call.config, (None, "heads"), (1, groups), "decode")[1]


def build_mask(info: MaskInfo) -> native.Mask:
    """Return the mask in the library's format."""
    ids = (info.q_segment_ids, info.q_index, info.kv_segment_ids, info.kv_index)
    return [x.astype(jnp.int32) for x in ids]


def build_rule(scoring: Scoring, *, causal: bool) -> native.AttentionRule:
    """Return the static settings of a call."""
    alibi = scoring.alibi
    return native.AttentionRule(
        scoring.scale,
        scoring.soft_cap or 0.0,
        causal,
        dropout=scoring.dropout,
        alibi_factor=1.0 if alibi is None else alibi.factor,
        alibi_rounded=alibi is not None and alibi.dtype is not None,
        fixed=fixed_order.active(),
    )


def get_limits(scoring: Scoring) -> Int[Array, " 2"]:
    """Return window and chunk; 0 = no limit."""
    limits = (scoring.window, scoring.chunk)
    return jnp.stack([jnp.asarray(0 if x is None else x, jnp.int32) for x in limits])


def get_sinks(scoring: Scoring) -> Float[Array, " h"]:
    """Return the sinks; an empty array if the model has none."""
    return jnp.asarray(() if scoring.sinks is None else scoring.sinks, jnp.float32)


def get_biases(scoring: Scoring) -> native.DistanceBiases:
    """Return the biases by distance; empty arrays if the model has none."""
    relative, alibi = scoring.relative, scoring.alibi
    return native.DistanceBiases(
        jnp.zeros((0, 0), jnp.float32) if relative is None else relative.by_distance(),
        jnp.asarray(() if alibi is None else alibi.slopes, jnp.float32),
    )


def _get_seed(scoring: Scoring) -> Int[Array, " n"]:
    """Return the seed of dropout; an empty array without dropout."""
    if scoring.dropout_key is None or scoring.dropout == 0:
        return jnp.zeros((0,), jnp.int32)
    return jax.lax.bitcast_convert_type(dropout.get_seed(scoring.dropout_key), jnp.int32)


def get_layer_index(at: tuple[int | jax.Array, ...]) -> Int[Array, " 1"]:
    """Return the index of the layer in a stack."""
    return jnp.asarray(at[0] if at else 0, jnp.int32).reshape(1)


def _arrays(stored: Numbers) -> tuple[jax.Array, jax.Array]:
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
    _kernel("flash_attn2", "projected", "blocks", attend_prompt, refusals_of_projected, _LACKS),
    _kernel(
        "autoregressive_decodeattn",
        "cache",
        "slots",
        cache_attention,
        refusals_of_cache,
        LACKS_STORED,
    ),
    *(
        _kernel(name, "pages", "pages", page_attention, refusals_of_pages, LACKS_STORED)
        for name in PAGED_NAMES
    ),
)
