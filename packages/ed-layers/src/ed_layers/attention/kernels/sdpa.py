"""`sdpa`: `jax.nn.dot_product_attention`, the whole score matrix by XLA.

Legend: b batch, s query length, h heads, d head dim of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Projected
from ed_layers.attention.scoring import padded
from ed_layers.devices import platform_of


def sdpa_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Softmax attention by jax's own function.

    The function takes one head dim: the smaller of the two is padded with zeros, which changes
    neither scores nor sums. A query that sees nothing would get the mean of all values there, and
    gets zeros here. Its softmax is computed in float32.
    """
    scoring, d = call.scoring, call.v.shape[-1]
    width = max(call.q.shape[-1], d)
    q, k, v = (padded(x, -1, width - x.shape[-1]) for x in (call.q, call.k, call.v))
    if q.dtype == jnp.float16 and platform_of(call.config) != "gpu":
        # jax asks for products of float16 summed in float32, which only GPUs have.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    mask = call.mask_info.allowed(window=scoring.window, chunk=scoring.chunk)[:, None]
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
