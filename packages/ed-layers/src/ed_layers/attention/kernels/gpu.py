"""Attention kernels on NVIDIA GPUs: cuDNN through jax, and Triton through tokamax if installed.

These kernels accept a length for each row, or a mask as an array, but no segments. If every row of
a batch is one segment at the left with padding at the right, the kernel receives lengths; this is
decided at run time. Packed rows use the kernels of `packed_gpu`. If these do not support a call,
the rows use a mask array if it is small, otherwise the XLA core of `blockwise`.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ed_layers.attention.kernel import FULL_SCORES_LIMIT, Kernel, Projected, reasons
from ed_layers.attention.kernels import packed_gpu
from ed_layers.attention.kernels.blockwise import blockwise_attention
from ed_layers.attention.scoring import WindowLimit, get_static_limit, pad_axis, static
from ed_layers.devices import get_compute_capability, get_platform, over_devices

#: Maximum size of a mask array on a device; a larger mask would need too much memory.
MASK_LIMIT = 2**28

#: `(q, k, v, mask=, is_causal=, lengths=, window=) -> out`, as `jax.nn.dot_product_attention`.
RowKernel = Callable[..., jax.Array]


def has_tokamax() -> bool:
    """Return whether tokamax is installed, an optional package with Triton kernels."""
    return find_spec("tokamax") is not None


def refusals_of_cudnn(call: Projected) -> list[str]:
    """Return the reasons why cuDNN does not support a call, besides `lacks`."""
    width = max(call.q.shape[-1], call.v.shape[-1])
    widest = 256 if get_compute_capability(call.config) >= (9, 0) else 128
    unfit = width % 8 != 0 or width > widest
    reason = f"a head dim of {width} (it has multiples of 8 up to {widest})"
    return reasons({reason: unfit}) + refusals_of_dtype(call)


def refusals_of_dtype(call: Projected) -> list[str]:
    """Return the reasons that apply to all kernels of this file."""
    dtype = call.q.dtype
    reason = f"{dtype} (it has bfloat16 and float16)"
    return reasons({reason: dtype not in (jnp.bfloat16, jnp.float16)})


def cudnn_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Compute cuDNN's flash attention."""
    return gpu_attention(partial(by_jax, call.scoring.scale, "cudnn"), call)


def triton_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Run tokamax's Triton kernel."""
    return gpu_attention(partial(by_tokamax, call.scoring.scale, call.scoring.soft_cap), call)


def gpu_attention(kernel: RowKernel, call: Projected) -> Float[Array, "b s h d"]:
    """Run a kernel with the configured backward pass.

    `flash_attention_backward_pass_impl="triton"` selects the backward pass of the kernel. With
    "xla", the XLA core computes the gradients, and one more forward pass: the kernel's log-sum-exp
    is rounded to the dtype of the inputs. A soft cap always uses the core, because tokamax's Triton
    kernel has no backward pass for a soft cap.
    """
    # A function with a custom backward pass must receive all traced values as arguments.
    traced = tuple(None if static(x) else x for x in (call.scoring.window, call.scoring.chunk))

    def build_call(
        q, k, v, mask_info, limits: tuple[WindowLimit | None, WindowLimit | None]
    ) -> Projected:
        window, chunk = (
            static_limit if limit is None else limit
            for static_limit, limit in zip(
                (call.scoring.window, call.scoring.chunk), limits, strict=True
            )
        )
        scoring = replace(call.scoring, window=window, chunk=chunk)
        return replace(call, q=q, k=k, v=v, mask_info=mask_info, scoring=scoring)

    def native(q, k, v, mask_info, limits):
        def one_device(q, k, v, mask_info, _):
            return on_rows(kernel, build_call(q, k, v, mask_info, limits))

        return over_devices(one_device, call.config, q, k, v, mask_info)

    def lean(*arrays):
        return blockwise_attention(build_call(*arrays))

    backward_impl = (
        "triton" if call.config is None else call.config.flash_attention_backward_pass_impl
    )
    if backward_impl == "xla" or call.scoring.soft_cap is not None:
        native = replace_backward(lean, native)
    return native(call.q, call.k, call.v, call.mask_info, traced)


def replace_backward(
    backward: Callable[..., jax.Array], forward: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return `forward(q, k, v, *rest)` with the gradients of `backward(q, k, v, *rest)`."""

    @jax.custom_vjp
    def attention(q, k, v, *extra_arguments):
        return forward(q, k, v, *extra_arguments)

    def save(q, k, v, *extra_arguments):
        return forward(q, k, v, *extra_arguments), (q, k, v, extra_arguments)

    def pull(saved, d_out):
        *qkv, extra_arguments = saved
        _, of = jax.vjp(lambda *qkv: backward(*qkv, *extra_arguments), *qkv)
        return (*of(d_out), *(None for _ in extra_arguments))

    attention.defvjp(save, pull)
    return attention


def on_rows(kernel: RowKernel, call: Projected) -> Float[Array, "b s h d"]:
    """Compute the rows of one device, by lengths if possible."""
    q, k, v, mask_info, scoring = call.q, call.k, call.v, call.mask_info, call.scoring
    b, s, t = q.shape[0], q.shape[1], k.shape[1]
    if s % 2 or t % 2:  # jax refuses to differentiate odd lengths by cuDNN: one more is padding
        more = {"q_segment_ids": s % 2, "q_index": s % 2, "kv_segment_ids": t % 2}
        more["kv_index"] = t % 2
        ids = {name: pad_axis(getattr(mask_info, name), 1, n) for name, n in more.items()}
        q, k, v = pad_axis(q, 1, s % 2), pad_axis(k, 1, t % 2), pad_axis(v, 1, t % 2)
        even = replace(call, q=q, k=k, v=v, mask_info=replace(mask_info, **ids))
        return on_rows(kernel, even)[:, :s]

    def by_mask(q, k, v):
        mask = mask_info.get_mask(window=scoring.window, chunk=scoring.chunk)
        out = kernel(q, k, v, mask=mask[:, None])
        return jnp.where(jnp.any(mask, axis=2)[:, :, None, None], out, 0)

    def by_blocks(q, k, v):
        return blockwise_attention(replace(call, q=q, k=k, v=v))

    def by_segments(q, k, v):
        shape = packed_gpu.RowShape.of(call, q, k, interpret=False)
        limits = packed_gpu.limit_keys(mask_info, scoring)
        return packed_gpu.attention_of_rows(shape, q, k, v, None, limits)

    otherwise = by_mask if b * s * t <= MASK_LIMIT else by_blocks
    if get_platform(call.config) == "gpu" and not packed_gpu.list_refusals(call):
        otherwise = by_segments
    window = get_static_limit(scoring.window)
    # Neither library supports a bidirectional window.
    supports_window = static(scoring.window) and (window is None or mask_info.causal)
    if not (supports_window and mask_info.in_order and scoring.chunk is None):
        return otherwise(q, k, v)
    single, lengths = one_segment(mask_info.q_segment_ids)

    def by_lengths(q, k, v):
        out = kernel(q, k, v, is_causal=mask_info.causal, lengths=lengths, window=window)
        return jnp.where(mask_info.q_segment_ids[:, :, None, None] > 0, out, 0)

    return jax.lax.cond(single, by_lengths, otherwise, q, k, v)


def one_segment(segments: Int[Array, "b s"]) -> tuple[Bool[Array, ""], Int[Array, " b"]]:
    """Return whether each row is one segment at the left, and the lengths."""
    lengths = jnp.sum(segments > 0, axis=1, dtype=jnp.int32)
    inside = jnp.arange(segments.shape[1]) < lengths[:, None]
    return jnp.all(segments == jnp.where(inside, segments[:, :1], 0)), lengths


def arguments(
    mask: jax.Array | None = None,
    is_causal: bool = False,
    lengths: jax.Array | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Return the mask in the format of jax and tokamax."""
    return {
        "mask": mask,
        "is_causal": is_causal,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths,
        # jax and tokamax count only the keys before a query; `window` also counts the query.
        "local_window_size": None if window is None else (window - 1, 0),
    }


def by_jax(
    scale: float, implementation: Literal["xla", "cudnn"], q, k, v, **mask: Any
) -> Float[Array, "b s h d"]:
    """Call `jax.nn.dot_product_attention` with cuDNN's flash attention.

    The narrower head dim is padded with zeros.
    """
    q, k, v, d = equally_wide(q, k, v)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        implementation=implementation,
        **arguments(**mask),
    )
    return out[..., :d]


def equally_wide(q, k, v) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Return q, k and v with the wider of their head dims, padded with zeros, and v's own width."""
    d = v.shape[-1]
    width = max(q.shape[-1], d)
    q, k, v = (pad_axis(x, -1, width - x.shape[-1]) for x in (q, k, v))
    return q, k, v, d


def by_tokamax(
    scale: float, soft_cap: float | None, q, k, v, **mask: Any
) -> Float[Array, "b s h d"]:
    """Call tokamax's attention in Triton.

    The narrower head dim is padded with zeros: with different head dims, the gradients of q and k
    of tokamax 0.0.17 are wrong.
    """
    from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]

    call = {"scale": scale, "logits_soft_cap": soft_cap, "implementation": "triton"}
    q, k, v, d = equally_wide(q, k, v)
    return dot_product_attention(q, k, v, **call, **arguments(**mask))[..., :d]


def _cudnn(mechanism: str, auto_from: int | None) -> Kernel[Projected]:
    return Kernel(
        mechanism,
        "projected",
        "cuDNN",
        cudnn_attention,
        platform="gpu",
        language="cudnn",
        lacks=frozenset({"ahead", "soft_cap", "sinks", "bias", "alibi", "relative", "dropout"}),
        refuses=refusals_of_cudnn,
        auto_from=auto_from,
    )


KERNELS = (
    _cudnn("cudnn", FULL_SCORES_LIMIT + 1),
    Kernel(
        "flash_attn2",
        "projected",
        "tokamax (Triton)",
        triton_attention,
        platform="gpu",
        language="triton",
        lacks=frozenset({"ahead", "sinks", "bias", "alibi", "relative", "dropout"}),
        refuses=refusals_of_dtype,
        available=lambda: has_tokamax(),
        needs="tokamax",
    ),
    _cudnn("flash_attn2", None),
)
