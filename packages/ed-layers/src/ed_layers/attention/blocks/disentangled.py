"""Disentangled attention (DeBERTa, He et al. 2021): scores of contents and of relative positions.

Legend: b batch, s query positions, t key positions, h heads, k head dim, n rows of the table.
"""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.attention.blocks.settings import Disentangled


def disentangled_bias(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t h k"],
    position_queries: Float[Array, "n h k"] | None,
    position_keys: Float[Array, "n h k"] | None,
    mask_info: MaskInfo,
    form: Disentangled,
    scale: float,
) -> Float[Array, "b h s t"]:
    """Return the part of the scores that depends on relative positions.

    Args:
        q, k: queries and keys of the tokens.
        position_queries: queries of the rows of the table, for "p2c"; None without it.
        position_keys: keys of the rows of the table, for "c2p"; None without it.
        mask_info: the order of the tokens in their segments.
        form: the form of the buckets.
        scale: factor on the scores.
    """
    row = _get_rows(mask_info.q_index[:, :, None] - mask_info.kv_index[:, None, :], form)[:, None]
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    bias = jnp.zeros(shape, jnp.float32)
    if position_keys is not None:
        scores = jnp.einsum("bshk,nhk->bhsn", q, position_keys)
        bias = bias + jnp.take_along_axis(scores, jnp.broadcast_to(row, shape), axis=-1)
    if position_queries is not None:
        scores = jnp.einsum("bthk,nhk->bhtn", k, position_queries)
        flipped = jnp.broadcast_to(row, shape).swapaxes(2, 3)
        bias = bias + jnp.take_along_axis(scores, flipped, axis=-1).swapaxes(2, 3)
    return bias * scale


def _get_rows(distance: Int[Array, "b s t"], form: Disentangled) -> Int[Array, "b s t"]:
    """Return the row of the table for each distance of a query from a key."""
    buckets = jnp.asarray(_buckets(form.buckets, form.max_distance))
    bucket = buckets[jnp.minimum(jnp.abs(distance), buckets.shape[0] - 1)]
    return jnp.clip(jnp.sign(distance) * bucket + form.span, 0, 2 * form.span - 1)


@cache
def _buckets(count: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance from 0, computed in float32 as in transformers.

    The first half of the buckets holds one distance each; the others grow logarithmically. With no
    buckets, every distance is a bucket.
    """
    distance = np.arange(4 * max_distance + 1, dtype=np.float32)
    if count <= 0:
        return distance.astype(np.int32)
    half = np.float32(count // 2)
    growth = np.log(np.maximum(distance, half) / half, dtype=np.float32)
    last = np.log(np.float32((max_distance - 1) / (count // 2)), dtype=np.float32)
    large = np.ceil(growth / last * (half - 1)) + half
    return np.where(distance <= half, distance, large).astype(np.int32)
