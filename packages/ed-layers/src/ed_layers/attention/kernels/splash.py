"""`blocksparse`: jax's splash attention on TPU, which skips blocks without allowed pairs.

The kernel accepts a static mask over positions, and segment ids. Both follow from a `MaskInfo`
whose tokens are in the order of the row. A chunk becomes part of the segment ids, so it may be
traced. Inside the kernel, padding attends to padding; its output is set to zero afterwards.

Legend: b batch, s length, h heads, g kv heads, k head dim of queries and keys, d head dim of
values, x block of queries, y block of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.attention.kernel import FULL_SCORES_LIMIT, Kernel, Projected, Settings, reasons
from ed_layers.attention.scoring import WindowLimit, get_static_limit, pad_axis, static
from ed_layers.devices import over_devices

#: Lanes of a TPU register: blocks of keys are multiples of it.
LANES = 128


def refusals(call: Projected) -> list[str]:
    """Return the reasons why splash attention does not support a call, besides `LACKS`."""
    dtype = call.q.dtype
    return reasons(
        {
            "queries and keys that are not the same tokens in order": not call.mask_info.in_order,
            "a traced window": not static(call.scoring.window),
            f"{dtype} (it has float32 and bfloat16)": dtype not in (jnp.float32, jnp.bfloat16),
        }
    )


def splash_attention(call: Projected, *, interpret: bool = False) -> Float[Array, "b s h d"]:
    """Compute splash attention on TPU.

    Args:
        call: the call.
        interpret: interpret the kernel on any device, for tests.
    """
    window, soft_cap = get_static_limit(call.scoring.window), call.scoring.soft_cap
    kernel = partial(on_one_device, window=window, soft_cap=soft_cap, interpret=interpret)
    return in_whole_blocks(kernel, call, call.scoring.sinks)


def in_whole_blocks(
    kernel: Callable[..., jax.Array], call: Projected, heads: jax.Array | None = None
) -> Float[Array, "b s h d"]:
    """Run a kernel for whole blocks on the rows and heads of each device; padding gets zeros.

    Args:
        kernel: `(q, k, v, segments, heads, block_q=, block_k=, causal=) -> out`; q is scaled.
        heads: an array with the heads as first axis.
    """
    length = call.q.shape[1]
    block_q, block_k, padded_length = tpu_blocks(call.settings, length)
    segments = get_chunk_segments(call.mask_info, call.scoring.chunk)
    arrays = (call.q * call.scoring.scale, call.k, call.v, segments)
    q, k, v, ids = (pad_axis(x, 1, padded_length - length) for x in arrays)
    kernel = partial(kernel, block_q=block_q, block_k=block_k, causal=call.mask_info.causal)
    out = over_devices(kernel, call.config, q.astype(k.dtype), k, v, ids, heads)
    return jnp.where(segments[:, :, None, None] > 0, out[:, :length], 0)


def on_one_device(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g d"],
    segments: Int[Array, "b s"],
    sinks: Float[Array, " h"] | None,
    *,
    block_q: int,
    block_k: int,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> Float[Array, "b s h d"]:
    """Run the kernel on each row; it accepts [h, s, k], and scaled queries."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    s, h = q.shape[1:3]
    if window is not None:
        # Splash counts the keys without the query, a window includes the query.
        mask = masks.LocalMask((s, s), (window - 1, 0 if causal else window - 1), offset=0)
    else:
        mask = masks.CausalMask((s, s)) if causal else masks.FullMask((s, s))
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    run = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * h),
        block_sizes=sizes,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
        ids = kernels.SegmentIds(segments, segments)
        out = run(q, k, v, segment_ids=ids, sinks=sinks)
        return out.swapaxes(0, 1)  # type: ignore[union-attr]

    return jax.vmap(row)(q, k, v, segments)


def tpu_blocks(settings: Settings, s: int) -> tuple[int, int, int]:
    """Return tokens per block of queries and of keys, and a length of at least `s` for both."""
    longest = -(-s // LANES) * LANES
    block_q, block_k = (
        min(-(-(size or LANES) // LANES) * LANES, longest)
        for size in (settings.block_q, settings.block_k)
    )
    block_multiple = math.lcm(block_q, block_k)
    return block_q, block_k, -(-s // block_multiple) * block_multiple


def get_chunk_segments(mask_info: MaskInfo, chunk: WindowLimit | None) -> Int[Array, "b s"]:
    """Return segment ids in which each chunk is a segment, numbered by its start position + 1."""
    segments = mask_info.q_segment_ids
    if chunk is None:
        return segments
    size = jnp.asarray(chunk)
    within = jnp.where(size > 0, mask_info.q_index % jnp.maximum(size, 1), mask_info.q_index)
    starts = jnp.arange(segments.shape[1]) - within + 1
    return jnp.where(segments > 0, starts, 0).astype(segments.dtype)


LACKS = frozenset({"ahead", "bias", "alibi", "relative", "dropout"})
KERNELS = tuple(
    Kernel(
        name,
        "projected",
        "splash attention (Pallas)",
        splash_attention,
        platform="tpu",
        language="pallas",
        lacks=LACKS,
        refuses=refusals,
        auto_from=auto_from,
    )
    for name, auto_from in (("blocksparse", FULL_SCORES_LIMIT + 1), ("flash_attn2", None))
)
