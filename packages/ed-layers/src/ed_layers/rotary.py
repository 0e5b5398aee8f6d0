"""Rotary position embedding (Su et al. 2021); `ed_infra.rope.frequencies` has the frequencies.

XLA's CPU backend computes cosines and sines at every use, so again for every head of every layer.
The native library rotates by tables instead.

Legend: b batch, s sequence, h heads, k head dim, r rotary dimension (r <= k), r2 half of r.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.rope.rotation import angles, rotate
from jaxtyping import Array, Float, Int

from ed_layers import fixed_order
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
    if rotates_natively(x):
        tables = (jnp.broadcast_to(t, (*x.shape[:2], t.shape[-1])) for t in rope)
        return rotate_native(interleaved, x, *(t.astype(jnp.float32) for t in tables))
    cos, sin = (table[:, :, None, :] for table in rope)
    return rotate(x, cos, sin, interleaved)


def rotates_natively(x: jax.Array) -> bool:
    """Return whether `rotate_native` is available for this array."""
    from ed_layers.native.library import in_use  # not loaded with a family

    return x.dtype in (jnp.float32, jnp.bfloat16) and in_use()


def rotate_native(
    interleaved: bool,
    x: Float[Array, "b s h k"],
    cos: Float[Array, "b s r2"],
    sin: Float[Array, "b s r2"],
) -> Float[Array, "b s h k"]:
    """Return `ed_infra.rope.rotation.rotate`; the gradient treats the tables as constants."""
    return _rotate((interleaved, fixed_order.KernelChoice.get_current()), x, cos, sin)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(static: tuple[bool, fixed_order.KernelChoice], x, cos, sin):
    return _turn(static, x, cos, sin, back=False)


def _turn(static: tuple[bool, fixed_order.KernelChoice], x, cos, sin, *, back: bool):
    interleaved, choice = static
    x_axes, table_axes = ("batch", None, "heads", None), ("batch", None, None)
    turn = partial(_turn_part, interleaved, back)
    with choice.restore():
        return fixed_order.run_on_shards(
            turn, (x, cos, sin), (x_axes, table_axes, table_axes), [(x_axes, x.shape)]
        )[0]


def _turn_part(interleaved: bool, back: bool, x, cos, sin):
    from ed_layers.native.library import TARGETS

    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_rotary"], result, vmap_method="sequential")
    return [call(x, cos, sin, neighbours=interleaved, back=back)]


def _forward(static, x, cos, sin):
    return _rotate(static, x, cos, sin), (cos, sin)


def _backward(static, saved, cotangent):
    # The transpose of a rotation times a factor rotates back, with the same factor.
    return _turn(static, cotangent, *saved, back=True), None, None


_rotate.defvjp(_forward, _backward)
