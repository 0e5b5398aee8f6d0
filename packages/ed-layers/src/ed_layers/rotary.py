"""Rotary position embedding (Su et al. 2021), halves rotated as in Hugging Face and GPT-NeoX.

Legend: b batch, s sequence, h heads, k head dim.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_tables(
    position_ids: Int[Array, "b s"], inv_freq: Float[Array, " half"], scaling: float = 1.0
) -> tuple[Float[Array, "b s half"], Float[Array, "b s half"]]:
    """Cosine and sine of position times frequency, float32.

    Args:
        position_ids: position of each token.
        inv_freq: radians per position, one per pair of dimensions (`ed_infra.rope`).
        scaling: YaRN's and longrope's attention factor, applied to both tables.
    """
    angles = position_ids[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def apply_rotary(
    x: Float[Array, "b s h k"], rope: tuple[Float[Array, "b s half"], Float[Array, "b s half"]]
) -> Float[Array, "b s h k"]:
    """Rotate the first `2 * half` dimensions of every head; the rest passes through (partial rope).

    Computed in float32, returned in the dtype of `x`.
    """
    cos, sin = (table[:, :, None, :] for table in rope)
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
