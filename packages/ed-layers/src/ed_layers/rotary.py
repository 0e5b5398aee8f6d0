"""Rotary position embedding (Su et al. 2021); `ed_infra.rope.frequencies` has the frequencies.

Legend: b batch, s sequence, h heads, k head dim, r rotary dimension (r <= k).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.rope.rotation import angles, rotate
from jaxtyping import Array, Float, Int

from ed_layers import native
from ed_layers.context import Rope


def rope_tables(
    position_ids: Int[Array, "*p"],
    inv_freq: Float[Array, "*p half"] | Float[Array, " half"],
    scaling: float | Float[Array, "*p"] = 1.0,
) -> tuple[Float[Array, "*p half"], Float[Array, "*p half"]]:
    """Return cosine and sine of position times frequency, float32.

    Args:
        position_ids: position of each token.
        inv_freq: radians per position, one per pair of dimensions; optionally separate per token.
        scaling: attention factor of YaRN and LongRoPE, applied to both tables.
    """
    if isinstance(scaling, jax.Array):
        scaling = scaling[..., None]
    return angles(position_ids, inv_freq, scaling)


def apply_rotary(
    x: Float[Array, "b s h k"], rope: Rope, *, interleaved: bool = False
) -> Float[Array, "b s h k"]:
    """Rotate the first r dimensions of every head; the other dimensions stay unchanged.

    Args:
        x: queries or keys.
        rope: `(cos, sin)` of the batch's positions.
        interleaved: pairs are adjacent elements (GPT-J, GLM) instead of halves (Llama, GPT-NeoX).

    Returns:
        An array with the shape and dtype of `x`; computed in float32.
    """
    if native.rotary.takes(x):
        tables = (jnp.broadcast_to(t, (*x.shape[:2], t.shape[-1])) for t in rope)
        return native.rotary.rotate_native(interleaved, x, *(t.astype(jnp.float32) for t in tables))
    cos, sin = (table[:, :, None, :] for table in rope)
    return rotate(x, cos, sin, interleaved)
