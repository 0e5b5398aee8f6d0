"""`flash_attn2` and `cudnn`: which kernel a call takes, by platform and by what it asks for.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from functools import partial

from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention import flash_tpu, gpu, splash
from ed_layers.attention.hardware import has_tokamax
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.native import as_blockwise, native_platform, taken
from ed_layers.attention.scoring import Scoring


def flash_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """`flash_attn2`; see `attend` for the arguments.

    On TPU flash attention in Pallas, for windows, soft cap, sinks and other value dims splash
    attention; on GPU tokamax's Triton kernel if tokamax is installed, else cuDNN; `blockwise`
    elsewhere, and for what they cannot do.
    """
    name, given = "flash_attn2", (q, k, v, mask_info, scoring, mechanism)
    platform = native_platform(mechanism, name)
    if platform == "tpu":
        if not flash_tpu.refusals(*given[:5]):
            taken(mechanism, name, "flash attention (Pallas)", [])
            return flash_tpu.flash_on_tpu(name, *given)
        if taken(mechanism, name, "splash attention (Pallas)", splash.refusals(*given[:5])):
            return splash.splash_attention(name, *given)
    elif platform == "gpu" and has_tokamax():
        if taken(mechanism, name, "tokamax (Triton)", gpu.refusals_of_any(q, scoring)):
            kernel = partial(gpu.by_tokamax, scoring.scale, scoring.soft_cap, "triton")
            return gpu.gpu_attention(kernel, name, *given)
    elif platform == "gpu" and takes_cudnn(name, *given):
        return gpu.gpu_attention(partial(gpu.by_jax, scoring.scale, "cudnn"), name, *given)
    return as_blockwise(name, *given)


def cudnn_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """`cudnn`: cuDNN's flash attention on GPU, `blockwise` elsewhere and for what it cannot do."""
    given = (q, k, v, mask_info, scoring, mechanism)
    if native_platform(mechanism, "cudnn") == "gpu" and takes_cudnn("cudnn", *given):
        return gpu.gpu_attention(partial(gpu.by_jax, scoring.scale, "cudnn"), "cudnn", *given)
    return as_blockwise("cudnn", *given)


def takes_cudnn(name, q, k, v, mask_info, scoring, mechanism) -> bool:
    """Whether a call of mechanism `name` goes to cuDNN; says so once, or why not."""
    return taken(mechanism, name, "cuDNN", gpu.refusals_of_cudnn(q, v, scoring, mechanism))
