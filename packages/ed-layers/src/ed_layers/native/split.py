"""Float32 products from products of bfloat16 parts, which some processors multiply faster.

A float32 number has 24 bits. Its two parts are `high`, the number rounded to the 8 bits of
bfloat16, and `low`, the rest rounded to 8 bits. `x @ w` is then `high @ high + high @ low +
low @ high`, with an error of up to 5e-6 of the largest result. One call computes these sums: the
parts of one operand lie side by side as `[high, high, low]`, those of the other as
`[high, low, high]`. `precision: high` selects the same three products on TPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ed_layers import fixed_order
from ed_layers.native.library import level

HIGH = ("high", jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
#: Levels that multiply bfloat16 numbers more than three times as fast as float32 numbers.
SPLIT_LEVELS = ("amx",)
#: Least number of rows. By estimate, to split a matrix takes as long as to multiply 180 rows by it.
LEAST_ROWS = 256


def takes(precision: jax.lax.PrecisionLike, rows: int, arrays: Sequence[jax.Array]) -> bool:
    """Return whether products of such a precision and number of rows are split."""
    return (
        precision in HIGH
        and level() in SPLIT_LEVELS
        and rows >= LEAST_ROWS
        and all(array.dtype == jnp.float32 for array in arrays)
        and not fixed_order.active()
    )


def split_left(x: jax.Array, axis: int) -> jax.Array:
    """Return the parts of a left operand along the axis of the sums, bfloat16."""
    high, low = _parts(x)
    return jnp.concatenate([high, high, low], axis)


def right(w: jax.Array, axis: int) -> jax.Array:
    """Return the parts of a right operand along the axis of the sums, bfloat16."""
    high, low = _parts(w)
    return jnp.concatenate([high, low, high], axis)


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `high` and `low`. `low` of a number that is not finite is NaN."""
    # XLA may omit a conversion to bfloat16 and back, but not this rounding.
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
