"""jax's flash attention on TPU (Pallas), the kernel of `flash_attn2` for plain calls.

The kernel also processes blocks of rows (`blocksize_b`). It supports neither windows, soft caps nor
grouped heads: keys are repeated, and splash attention computes the other calls.

Legend: b batch, s length, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ed_layers.attention.kernel import Kernel, Projected
from ed_layers.attention.kernels import splash


def flash_on_tpu(call: Projected) -> Float[Array, "b s h k"]:
    """Run the kernel with `blocksize_b` rows per block."""
    rows = 1 if call.config is None else call.config.blocksize_b
    return splash.in_whole_blocks(partial(_on_one_device, block_b=rows), call)


def _on_one_device(
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
    """Run the kernel, which accepts [b, h, s, k] and scaled queries."""
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


KERNELS = (
    Kernel(
        "flash_attn2",
        "projected",
        "flash attention (Pallas)",
        flash_on_tpu,
        platform="tpu",
        language="pallas",
        lacks=splash.LACKS | {"window", "soft_cap", "sinks", "value_dim"},
        refuses=splash.refusals,
        auto_from=None,
    ),
)
