"""jax's flash attention on TPU (Pallas), the kernel of `flash_attn2` there for plain calls.

It goes over blocks of rows too (`blocksize_b`), and knows neither windows, soft cap nor grouped
heads: keys are repeated, and what it cannot do is left to splash attention.

Legend: b batch, s length, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.native import over_devices
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.splash import blocks_of, padded, segments_of
from ed_layers.attention.splash import refusals as refusals_of_splash


def refusals(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_info: MaskInfo, scoring: Scoring
) -> list[str]:
    """What flash attention cannot do of what a call asks for."""
    reasons = {
        "a window": scoring.window is not None,
        "a soft cap": scoring.soft_cap is not None,
        "sinks": scoring.sinks is not None,
        "values of another width": q.shape[-1] != v.shape[-1],
    }
    beyond = [reason for reason, holds in reasons.items() if holds]
    return beyond + refusals_of_splash(q, k, v, mask_info, scoring)


def flash_on_tpu(
    name: str,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h k"]:
    """The kernel, by the block sizes of mechanism `name` and by `blocksize_b`."""
    block_q, block_k, length = blocks_of(mechanism, name, q.shape[1])
    kernel = partial(
        on_one_device,
        block_q=block_q,
        block_k=block_k,
        block_b=getattr(mechanism.config, "blocksize_b", 1),
        causal=mask_info.causal,
    )
    segments = segments_of(mask_info, scoring.chunk)
    padding = length - q.shape[1]
    q, k, v, ids = (padded(x, padding) for x in (q * scoring.scale, k, v, segments))
    out = over_devices(kernel, mechanism.config, q.astype(k.dtype), k, v, ids)
    return jnp.where(segments[:, :, None, None] > 0, out[:, : segments.shape[1]], 0)


def on_one_device(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    segments: Int[Array, "b s"],
    _: None = None,
    *,
    block_q: int,
    block_k: int,
    block_b: int,
    causal: bool,
) -> Float[Array, "b s h k"]:
    """The kernel: it takes [b, h, s, k], and queries that are scaled already."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    b, repeat = q.shape[0], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
    sizes = kernels.BlockSizes(
        block_b=max(n for n in range(1, min(block_b, b) + 1) if b % n == 0),
        block_q=block_q,
        block_k_major=block_k,
        block_k=block_k,
        block_q_major_dkv=block_q,
        block_q_dkv=block_q,
        block_k_major_dkv=block_k,
        block_k_dkv=block_k,
        block_q_dq=block_q,
        block_k_major_dq=block_k,
        block_k_dq=block_k,
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    ids = kernels.SegmentIds(segments, segments)
    out = kernels.flash_attention(q, k, v, segment_ids=ids, causal=causal, block_sizes=sizes)
    return out.swapaxes(1, 2)
