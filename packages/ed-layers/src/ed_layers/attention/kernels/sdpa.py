"""`sdpa`: `jax.nn.dot_product_attention`, with the whole score matrix in XLA.

Legend: b batch, s query length, h heads, d head dim of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Projected
from ed_layers.attention.scoring import pad_axis
from ed_layers.devices import get_platform


def sdpa_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Compute attention with `jax.nn.dot_product_attention`, whose softmax is float32.

    That function requires equal head dims of keys and values, so the smaller one is padded with
    zeros. It returns the mean of all values for a query without visible keys; this function returns
    zeros instead.
    """
    scoring, d = call.scoring, call.v.shape[-1]
    width = max(call.q.shape[-1], d)
    q, k, v = (pad_axis(x, -1, width - x.shape[-1]) for x in (call.q, call.k, call.v))
    if q.dtype == jnp.float16 and get_platform(call.config) != "gpu":
        # jax requests float16 products with float32 sums, which only GPUs support.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    mask = call.mask_info.get_mask(window=scoring.window, chunk=scoring.chunk)[:, None]
    bias = scoring.bias
    if bias is not None:
        mask = mask & (bias > -jnp.inf)
    if scoring.by_distance:
        heads = jnp.arange(q.shape[2])[:, None]
        info = call.mask_info
        by_distance = scoring.distance_bias(heads, info.q_index, info.kv_index)[:, :, 0]
        bias = by_distance if bias is None else bias + by_distance
    out = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=scoring.scale, implementation="xla"
    )
    sees = jnp.any(mask, axis=-1).swapaxes(1, 2)
    return jnp.where(sees[..., None], out[..., :d], 0).astype(call.q.dtype)


KERNELS = (Kernel("sdpa", "projected", "jax.nn.dot_product_attention in XLA", sdpa_attention),)
