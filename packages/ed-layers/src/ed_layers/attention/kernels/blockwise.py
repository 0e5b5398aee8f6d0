"""`blockwise`: attention in plain XLA with every feature, in memory linear in the length.

This is the portable default for long sequences (Liu & Abbeel 2023; Dao et al. 2022), and the
fallback of mechanisms with platform kernels.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim
of queries and keys, d head dim of values, i query block, j key block, x, y their sizes.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Projected
from ed_layers.attention.kernels.online import BlockMask, Recipe, attention_of_blocks, row_blocks
from ed_layers.attention.kernels.softmax import share_beside
from ed_layers.attention.scoring import pad_axis, split_heads
from ed_layers.devices import get_platform

# Tokens of a block on a CPU. Forward and backward of 8 rows of 256 tokens need 13.8 ms with blocks
# of 64 tokens and 20.0 ms with blocks of 128. From 2048 tokens on, both sizes are equally fast.
CPU_BLOCK = 64
# On a GPU each turn of the loop over blocks launches several kernels: forward and backward of one
# row of 2048 tokens need 8.8 ms with blocks of 256 tokens and 1.6 ms with one block (H100).
GPU_BLOCK = 2048
#: Maximum number of scores of a block on a GPU.
GPU_SCORES = 2**28


def blockwise_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Compute attention over blocks; lengths are padded to whole blocks, and padding is masked."""
    q, k, v, scoring = call.q, call.k, call.v, call.scoring
    s, h, t, groups = *q.shape[1:3], *k.shape[1:3]
    block_q, block_k = call.settings.blocks(s, t, get_block_size(call))
    q_blocks, k_blocks, v_blocks = to_blocks(q, k, v, block_q, block_k)
    bias = scoring.bias
    if bias is not None:
        bias = split_heads(bias, groups, h // groups)
        bias = pad_axis(pad_axis(bias, 3, -s % block_q), 4, -t % block_k)
    recipe = Recipe.of(scoring, causal=call.mask_info.causal)
    mask = BlockMask.of(call.mask_info, scoring, block_q, block_k)
    out, lse = attention_of_blocks(  # type: ignore[misc]
        recipe, q_blocks, k_blocks, v_blocks, bias, scoring.relative, mask
    )
    if scoring.sinks is not None:
        out = out * share_beside(scoring.sinks.reshape(groups, -1, 1, 1), lse)
    return from_blocks(out.astype(q.dtype), s)


def get_block_size(call: Projected) -> int:
    """Return the default number of tokens of a block."""
    platform = get_platform(call.config)
    if platform != "gpu":
        return CPU_BLOCK if platform == "cpu" else 128
    block, rows = GPU_BLOCK, call.q.shape[0] * call.q.shape[2]
    while block > 128 and rows * block**2 > GPU_SCORES:
        block //= 2
    return block


def to_blocks(q, k, v, block_q: int, block_k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return [i, b, g, r, x, k], [j, b, g, y, k] and [j, b, g, y, d].

    The block axis leads, so indexing a block in a loop costs nothing.
    """
    b, s, h, k_dim = q.shape
    groups = k.shape[2]
    grouped = q.reshape(b, s, groups, h // groups, k_dim)
    q = row_blocks(grouped, block_q).transpose(0, 1, 3, 4, 2, 5)
    k, v = (row_blocks(x, block_k).transpose(0, 1, 3, 2, 4) for x in (k, v))
    return q, k, v


def from_blocks(out: jax.Array, s: int) -> jax.Array:
    """Reshape [i, b, g, r, x, d] to [b, s, h, d]."""
    _, b, groups, repeat, _, d = out.shape
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, groups * repeat, d)[:, :s]


KERNELS = tuple(
    Kernel(name, "projected", "plain XLA, block by block", blockwise_attention)
    for name in ("blockwise", "flash_attn2", "blocksparse", "cudnn")
)
