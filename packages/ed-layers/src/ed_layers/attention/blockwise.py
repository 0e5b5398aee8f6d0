"""`blockwise`: attention in memory linear in the length, in plain XLA, with every feature.

The portable default of long sequences: an online softmax over blocks of keys (Liu & Abbeel 2023;
Dao et al. 2022) that leaves out the blocks in which everything is masked.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim
of queries and keys, d head dim of values, i query block, j key block, x, y their sizes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.online import Spec, Where, attention_of_blocks, split
from ed_layers.attention.scoring import Scoring, split_heads


def blockwise_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """Softmax attention over blocks; lengths are padded to whole blocks, padding is masked."""
    _, s, h, _ = q.shape
    t, groups = k.shape[1], k.shape[2]
    block_q, block_k = mechanism.blocks("blockwise", s, t)
    q_blocks, k_blocks, v_blocks = to_blocks(q, k, v, block_q, block_k)
    bias = scoring.bias
    if bias is not None:
        bias = split_heads(bias, groups, h // groups)
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, -s % block_q), (0, -t % block_k)))
    spec = Spec.of(scoring, causal=mask_info.causal)
    where = Where.of(mask_info, scoring, block_q, block_k)
    found: Any = attention_of_blocks(spec, q_blocks, k_blocks, v_blocks, bias, where)
    out, lse = found
    if scoring.sinks is not None:
        out = out * share_beside(scoring.sinks.reshape(groups, -1, 1, 1), lse)
    return from_blocks(out.astype(q.dtype), s)


def to_blocks(q, k, v, block_q: int, block_k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[i, b, g, r, x, k], [j, b, g, y, k] and [j, b, g, y, d]: the block axis leads, so that a loop
    indexes it for free."""
    b, s, h, k_dim = q.shape
    groups = k.shape[2]
    q = split(q.reshape(b, s, groups, h // groups, k_dim), block_q).transpose(0, 1, 3, 4, 2, 5)
    k, v = (split(x, block_k).transpose(0, 1, 3, 2, 4) for x in (k, v))
    return q, k, v


def from_blocks(out: jax.Array, s: int) -> jax.Array:
    """[i, b, g, r, x, d] to [b, s, h, d]."""
    _, b, groups, repeat, _, d = out.shape
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, groups * repeat, d)[:, :s]


def share_beside(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """What is left for the keys when a sink takes part in the softmax: 0 where there are none."""
    # A sink of -inf is none; beside no keys, inf - inf would be NaN.
    sinks = jnp.maximum(sinks.astype(lse.dtype), jnp.finfo(lse.dtype).min)
    return jax.nn.sigmoid(lse - sinks)
