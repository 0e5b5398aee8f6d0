"""Kernels as another package would bring them: numpy on a CPU, in place of a native library.

`test_layers_attention_kernels.py` declares this module under the entry point group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from ed_layers.attention import Kernel
from ed_layers.attention.kernel import Cached, Call, Paged, Projected, Reads, reasons
from ed_layers.attention.kernels.blockwise import blockwise_attention
from ed_layers.attention.kernels.decode import decode_attention
from ed_layers.attention.kernels.gpu import replace_backward
from ed_layers.attention.kernels.paged import paged_attention

#: What has run: the reading of each call.
RAN: list[str] = []


def refuses(call: Call) -> list[str]:
    """A reason that depends on the call."""
    dim = call.q.shape[-1]
    return reasons({f"a head dim of {dim} (it has multiples of 8)": dim % 8 != 0})


def on_host(q, k, v, allowed, scale) -> np.ndarray:
    """Attention in numpy, [b, s, h, d]."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, repeat, axis=2) for x in (k, v))
    scores = np.where(allowed[:, None], np.einsum("bshk,bthk->bhst", q, k) * scale, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * allowed[:, None]
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return np.einsum("bhst,bthd->bshd", weights, v).astype(q.dtype)


def forward(q, k, v, call: Projected) -> jax.Array:
    """The host's numpy, from inside a compiled program."""
    allowed = call.mask_info.get_mask(window=call.scoring.window)
    shape = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    return jax.pure_callback(on_host, shape, q, k, v, allowed, call.scoring.scale)


def prefill(call: Projected) -> jax.Array:
    """Prompts and training: forward on the host, the backward pass of the lean core."""
    RAN.append("projected")
    run = replace_backward(
        lambda q, k, v: blockwise_attention(replace(call, q=q, k=k, v=v)),
        lambda *qkv: forward(*qkv, call),
    )
    return run(call.q, call.k, call.v)


def decode(call: Cached) -> jax.Array:
    """A token over a contiguous cache."""
    RAN.append("cache")
    return decode_attention(call)


def serve(call: Paged) -> jax.Array:
    """A step of the engine over pages."""
    RAN.append("pages")
    return paged_attention(call)


def record(mechanism: str, reads: Reads, run: Callable, auto_from: int) -> Kernel:
    """A record of this library."""
    return Kernel(
        mechanism,
        reads,
        f"toy {reads} kernel",
        run,
        platform="cpu",
        language="native",
        lacks=frozenset({"chunk", "soft_cap", "sinks", "bias", "alibi", "dropout"}),
        refuses=refuses,
        auto_from=auto_from,
    )


KERNELS = (
    record("flash_attn2", "projected", prefill, 32),
    record("autoregressive_decodeattn", "cache", decode, 1),
    record("ragged_page_attention_v3", "pages", serve, 1),
)
NOT_INSTALLED = replace(KERNELS[0], available=lambda: False, needs="toy-library")
MISNAMED = replace(KERNELS[0], mechanism="flash_atn2")
