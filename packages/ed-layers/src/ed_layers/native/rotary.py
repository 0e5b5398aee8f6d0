"""Rotation of queries and keys by tables of angles.

XLA's CPU backend computes cosines and sines at every use, so again for every head of every layer.

Legend: b batch, s tokens, h heads, k head dim, r2 half of the rotary dimension.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers import fixed_order
from ed_layers.native.library import TARGETS, in_use


def takes(x: jax.Array) -> bool:
    """Return whether `rotate_native` is available for this array."""
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
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_rotary"], result, vmap_method="sequential")
    return [call(x, cos, sin, neighbours=interleaved, back=back)]


def _forward(static, x, cos, sin):
    return _rotate(static, x, cos, sin), (cos, sin)


def _backward(static, saved, cotangent):
    # The transpose of a rotation times a factor rotates back, with the same factor.
    return _turn(static, cotangent, *saved, back=True), None, None


_rotate.defvjp(_forward, _backward)
