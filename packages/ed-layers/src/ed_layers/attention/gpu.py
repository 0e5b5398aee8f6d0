"""Attention kernels on NVIDIA GPUs: cuDNN through jax, and Triton through tokamax if installed.

They know rows of one length each, or a mask as an array, but no segments. A batch whose rows are
one segment from the left (padding behind it) goes in by lengths, decided when it runs; any other
by its mask while that is small, else through the lean XLA core.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from ed_layers.attention.hardware import compute_capability_of
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.native import as_blockwise, limit_of, over_devices, static
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.sdpa import widened
from ed_layers.attention.splash import padded

#: A mask as an array is used up to so many numbers on a device; beyond, memory counts more.
MASK_LIMIT = 2**28

#: `(q, k, v, mask=, is_causal=, lengths=, window=) -> out`, as `jax.nn.dot_product_attention`.
Kernel = Callable[..., jax.Array]


def refusals_of_cudnn(
    q: jax.Array, v: jax.Array, scoring: Scoring, mechanism: Mechanism
) -> list[str]:
    """What cuDNN cannot do of what a call asks for."""
    width = max(q.shape[-1], v.shape[-1])
    widest = 256 if compute_capability_of(mechanism.config) >= (9, 0) else 128
    reasons = {
        f"a head dim of {width}, not a multiple of 8 up to {widest}": width % 8 or width > widest,
        "a soft cap": scoring.soft_cap is not None,
    }
    return [reason for reason, holds in reasons.items() if holds] + refusals_of_any(q, scoring)


def refusals_of_any(q: jax.Array, scoring: Scoring) -> list[str]:
    """What no kernel here can do of what a call asks for."""
    reasons = {
        f"{q.dtype} (it has bfloat16 and float16)": q.dtype not in (jnp.bfloat16, jnp.float16),
        "sinks": scoring.sinks is not None,
        "a bias": scoring.bias is not None,
        "dropout": scoring.dropout > 0,
    }
    return [reason for reason, holds in reasons.items() if holds]


def gpu_attention(
    kernel: Kernel,
    name: str,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """A kernel under the name of a mechanism, with the backward pass that the config asks for.

    `flash_attention_backward_pass_impl="triton"` is the kernel's own backward pass. With "xla" it
    is the lean core's, which does not take the kernel's log-sum-exp (it comes rounded to the dtype
    of the inputs) but computes its own: gradients cost one more forward pass. So it is with a soft
    cap, of which tokamax's Triton kernel has no backward pass.
    """
    # What is traced has to be an argument of a function with a backward pass of its own.
    limits = tuple(None if static(x) else x for x in (scoring.window, scoring.chunk))
    scored = partial(on_rows, kernel, name, mechanism)

    def native(q, k, v, mask_info, limits):
        given = with_limits(scoring, limits)

        def one_device(q, k, v, mask_info, _):
            return scored(given, q, k, v, mask_info)

        return over_devices(one_device, mechanism.config, q, k, v, mask_info)

    def lean(q, k, v, mask_info, limits):
        given = with_limits(scoring, limits)
        return as_blockwise(name, q, k, v, mask_info, given, mechanism)

    given = getattr(mechanism.config, "flash_attention_backward_pass_impl", "triton")
    if given == "xla" or scoring.soft_cap is not None:
        native = with_backward_of(lean, native)
    return native(q, k, v, mask_info, limits)


def with_limits(scoring: Scoring, limits: tuple[Any, Any]) -> Scoring:
    """The scoring with other values of its traced limits."""
    window, chunk = limits
    window = scoring.window if window is None else window
    return replace(scoring, window=window, chunk=scoring.chunk if chunk is None else chunk)


def with_backward_of(backward: Callable, forward: Callable) -> Callable:
    """`forward(q, k, v, *rest)`, with the gradients of `backward(q, k, v, *rest)`."""

    @jax.custom_vjp
    def attention(q, k, v, *rest):
        return forward(q, k, v, *rest)

    def save(q, k, v, *rest):
        return forward(q, k, v, *rest), (q, k, v, rest)

    def pull(saved, d_out):
        *qkv, rest = saved
        _, of = jax.vjp(lambda *qkv: backward(*qkv, *rest), *qkv)
        return (*of(d_out), *(None for _ in rest))

    attention.defvjp(save, pull)
    return attention


def on_rows(
    kernel: Kernel,
    name: str,
    mechanism: Mechanism,
    scoring: Scoring,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
) -> Float[Array, "b s h d"]:
    """One device's rows, by lengths where they allow it."""
    b, s, t = q.shape[0], q.shape[1], k.shape[1]
    if s % 2 or t % 2:  # jax refuses to differentiate odd lengths by cuDNN: one more is padding
        q, k, v = padded(q, s % 2), padded(k, t % 2), padded(v, t % 2)
        more = {"q_segment_ids": s % 2, "q_index": s % 2, "kv_segment_ids": t % 2}
        more["kv_index"] = t % 2
        even = replace(mask_info, **{n: padded(getattr(mask_info, n), x) for n, x in more.items()})
        return on_rows(kernel, name, mechanism, scoring, q, k, v, even)[:, :s]

    def by_mask(q, k, v):
        mask = mask_info.allowed(window=scoring.window, chunk=scoring.chunk)
        out = kernel(q, k, v, mask=mask[:, None])
        return jnp.where(jnp.any(mask, axis=2)[:, :, None, None], out, 0)

    def by_blocks(q, k, v):
        return as_blockwise(name, q, k, v, mask_info, scoring, mechanism)

    otherwise = by_mask if b * s * t <= MASK_LIMIT else by_blocks
    window = limit_of(scoring.window)
    # A window to both sides is none of theirs.
    plain = static(scoring.window) and (window is None or mask_info.causal)
    if not (plain and mask_info.in_order and scoring.chunk is None):
        return otherwise(q, k, v)
    single, lengths = one_segment(mask_info.q_segment_ids)

    def by_lengths(q, k, v):
        out = kernel(q, k, v, is_causal=mask_info.causal, lengths=lengths, window=window)
        return jnp.where(mask_info.q_segment_ids[:, :, None, None] > 0, out, 0)

    return jax.lax.cond(single, by_lengths, otherwise, q, k, v)


def one_segment(segments: Int[Array, "b s"]) -> tuple[Bool[Array, ""], Int[Array, " b"]]:
    """Whether each row is one segment from the left, and how long those are."""
    lengths = jnp.sum(segments > 0, axis=1, dtype=jnp.int32)
    inside = jnp.arange(segments.shape[1]) < lengths[:, None]
    return jnp.all(segments == jnp.where(inside, segments[:, :1], 0)), lengths


def by_jax(
    scale: float,
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    lengths: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """jax's own function, with cuDNN's flash attention as implementation "cudnn".

    The narrower head dim is padded with zeros.
    """
    d = v.shape[-1]
    width = max(q.shape[-1], d)
    q, k, v = (widened(x, width) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        # jax counts the keys beside a query, a window counts the query too.
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,  # type: ignore[arg-type]
    )
    return out[..., :d]


def by_tokamax(
    scale: float,
    soft_cap: float | None,
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    lengths: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """tokamax's attention; its implementation "triton" runs on GPUs."""
    from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]

    return dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        logits_soft_cap=soft_cap,
        implementation=implementation,
    )
