"""Rotation of queries and keys by tables of angles.

XLA's CPU backend computes cosines and sines at every use, so again for every head of every layer.

Legend: b batch, s tokens, h heads, k head dim, r2 half of the rotary dimension.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers.native.library import TARGETS, in_use


def takes(x: jax.Array) -> bool:
    """Return whether `rotate` is available for this array."""
    return x.dtype in (jnp.float32, jnp.bfloat16) and in_use()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotate(
    interleaved: bool,
    x: Float[Array, "b s h k"],
    cos: Float[Array, "b s r2"],
    sin: Float[Array, "b s r2"],
) -> Float[Array, "b s h k"]:
    """Return `ed_infra.rope.rotation.rotate`; the gradient treats the tables as constants."""
    return _turn(interleaved, x, cos, sin, back=False)


def _turn(interleaved: bool, x, cos, sin, *, back: bool):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_rotary"], result, vmap_method="sequential")
    return call(x, cos, sin, neighbours=interleaved, back=back)


def _forward(interleaved, x, cos, sin):
    return rotate(interleaved, x, cos, sin), (cos, sin)


def _backward(interleaved, saved, cotangent):
    # The transpose of a rotation times a factor rotates back, with the same factor.
    return _turn(interleaved, cotangent, *saved, back=True), None, None


rotate.defvjp(_forward, _backward)
