"""`sdpa`: `jax.nn.dot_product_attention`, the whole score matrix by XLA.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.scoring import Scoring


def sdpa_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """Softmax attention by jax's own function; see `attend` for the arguments.

    The function takes one head dim: the smaller of the two is padded with zeros, which changes
    neither scores nor sums. A query that sees nothing would get the mean of all values there, and
    gets zeros here. Its softmax is computed in float32.
    """
    d = v.shape[-1]
    width = max(q.shape[-1], d)
    q, k, v = (widened(x, width) for x in (q, k, v))
    mask = mask_info.allowed(window=scoring.window, chunk=scoring.chunk)[:, None]
    if scoring.bias is not None:
        mask = mask & (scoring.bias > -jnp.inf)
    out = jax.nn.dot_product_attention(
        q, k, v, bias=scoring.bias, mask=mask, scale=scoring.scale, implementation="xla"
    )
    sees = jnp.any(mask, axis=-1).swapaxes(1, 2)
    return jnp.where(sees[..., None], out[..., :d], 0)


def widened(x: jax.Array, width: int) -> jax.Array:
    """Zeros behind the last axis, up to `width`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
