"""The functions of `EasyLM.bpt`: attention and feed-forward layers block by block.

Legend: b batch, s query length, t key length, h heads, d head dim, c chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.attention.kernel import Settings
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ChunkFunction = Callable[[Float[Array, "b c d"]], Float[Array, "b c e"]]


def blockwise_attn(
    query: Float[Array, "b s h d"],
    key: Float[Array, "b t h d"],
    value: Float[Array, "b t h d"],
    bias: Float[Array, "#b #h s t"] | None = None,
    deterministic: bool = True,
    dropout_rng: jax.Array | None = None,
    attn_pdrop: float = 0.0,
    causal: bool = True,
    query_chunk_size: int | None = 1024,
    key_chunk_size: int | None = 1024,
    dtype: DTypeLike | None = None,
    policy: Callable[..., bool] | None = None,
    precision: jax.lax.PrecisionLike = None,
    float32_logits: bool = True,
    prevent_cse: bool = True,
) -> Float[Array, "b s h d"]:
    """Compute attention without the whole matrix of scores (Liu & Abbeel 2023).

    Args:
        query, key, value: Projected inputs.
        bias: Added to the scores.
        deterministic: False drops weights with the probability `attn_pdrop`.
        dropout_rng: Random key of the dropout.
        attn_pdrop: Probability of the dropout.
        causal: Whether a query sees only keys at its position and before.
        query_chunk_size, key_chunk_size: Tokens of a block; None computes the whole matrix.
        dtype: Dtype of the computation and of the result; None: that of `query`.
        policy: Only None: blocks are always recomputed in the backward pass.
        precision: Precision of the products, as in jax.
        float32_logits: Whether scores are float32.
        prevent_cse: Only True.

    Raises:
        ConfigError: An argument has a value that the kernel does not support.
    """
    if policy is not None or not prevent_cse:
        raise ConfigError(
            "blockwise_attn recomputes its blocks in the backward pass: omit policy and prevent_cse"
        )
    drops = not deterministic and attn_pdrop > 0
    if drops and dropout_rng is None:
        raise ConfigError(f"attn_pdrop={attn_pdrop} needs dropout_rng, a random key of jax")
    target_dtype = query.dtype if dtype is None else jnp.dtype(dtype)
    is_single_block = query_chunk_size is None and key_chunk_size is None
    mechanism = Mechanism(
        name="vanilla" if is_single_block else "blockwise",
        default=Settings(block_q=query_chunk_size, block_k=key_chunk_size),
        dtype=target_dtype,
        softmax_dtype=jnp.dtype("float32") if float32_logits else target_dtype,
        dropout=attn_pdrop if drops else 0.0,
    )
    batch, length = query.shape[:2]
    mask = _mask(batch, length, key.shape[1], causal=causal)
    with jax.default_matmul_precision(str(precision).lower() if precision else None):
        out, _ = attend(
            query,
            key,
            value,
            mask,
            bias=bias,
            mechanism=mechanism,
            dropout_key=dropout_rng if drops else None,
        )
    return out.astype(target_dtype)


def _mask(batch: int, queries: int, keys: int, *, causal: bool) -> MaskInfo:
    """Return the mask of rows without padding, in which the first query is at the first key."""
    mask = MaskInfo.full(batch, max(queries, keys), causal)
    if queries == keys:
        return mask
    return replace(
        mask,
        q_segment_ids=mask.q_segment_ids[:, :queries],
        q_index=mask.q_index[:, :queries],
        kv_segment_ids=mask.kv_segment_ids[:, :keys],
        kv_index=mask.kv_index[:, :keys],
        in_order=False,
    )


def blockwise_ffn(
    cell: ChunkFunction,
    inputs: Float[Array, "b s d"],
    chunk_size: int,
    deterministic: bool = True,
    policy: Callable[..., bool] | None = None,
    prevent_cse: bool = True,
) -> Float[Array, "b s e"]:
    """Apply a feed-forward layer to `chunk_size` positions at a time.

    Args:
        cell: The layer, a function of [b, c, d].
        inputs: The hidden states.
        chunk_size: Number of positions of a chunk.
        deterministic: Passed to a layer that has the method `forward_ffn`.
        policy: What `jax.checkpoint` may keep; None: nothing.
        prevent_cse: As in `jax.checkpoint`.

    Raises:
        ConfigError: The size of a chunk is not positive.
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size} must be positive")
    forward = getattr(cell, "forward_ffn", None)

    def apply(part: jax.Array) -> jax.Array:
        return cell(part) if forward is None else forward(part, deterministic=deterministic)

    length = inputs.shape[1]
    padded = jnp.pad(inputs, ((0, 0), (0, -length % chunk_size), (0, 0)))
    parts = padded.reshape(inputs.shape[0], -1, chunk_size, inputs.shape[2]).swapaxes(0, 1)
    out = jax.lax.map(jax.checkpoint(apply, policy=policy, prevent_cse=prevent_cse), parts)
    return out.swapaxes(0, 1).reshape(inputs.shape[0], -1, out.shape[-1])[:, :length]
