"""Formats of quantized weights: the values of codes, and the conversion of numbers to codes.

A matrix [.., i, o] is divided along its contracted dimension into n groups of k values. Each group
of a column has one scale, and the value of a code is

    (level(code) - zero) * scale

or, without a zero, `level(code) * scale`. A further format is an entry of `FORMATS`.

Legend: i in features, o out features, n groups, k values of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from jaxtyping import Array, Float

#: The 16 levels of NF4, equal to those of bitsandbytes (Dettmers et al. 2023, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: Values of a 4-bit number E2M1: sign, two bits of exponent, one bit of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8 = 448.0  # the largest float8_e4m3fn
_FLOAT16 = 65504.0  # the largest float16
_MX = 32  # values of a block, in every microscaling format

Grouped = Float[Array, "*lead n k o"]


class GroupCodes(NamedTuple):
    """The result of an encoder for groups [.., n, k, o]: codes of the same shape, scales [.., n,
    o]: float32, float16 or float8_e8m0fnu."""

    codes: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None


@dataclass(frozen=True)
class StorageFormat:
    """A storage format of numbers.

    Attributes:
        encode: converts groups to codes and scales.
        level: converts codes to numbers before zero and scale, float32.
        packed: whether two codes share a byte.
        group: default number of values of a group; None = a whole column.
        only: whether no other group size is possible.
    """

    encode: Callable[[Grouped], GroupCodes]
    level: Callable[[jax.Array], jax.Array]
    packed: bool = False
    group: int | None = None
    only: bool = False

    @property
    def in_byte(self) -> int:
        """Number of codes in a byte."""
        return 2 if self.packed else 1

    def get_group_size(self, inputs: int, group_size: int | None, name: str) -> int:
        """Return the group size for a dimension.

        Args:
            inputs: i.
            group_size: the configured size; None = the default of the format, or the largest
                divisor below the default.
            name: name of the format, for messages.

        Raises:
            ConfigError: the size does not divide the dimension, or the format does not support it.
        """
        # A group of 4-bit codes fills whole bytes.
        sizes = [size for size in divisors(inputs) if not self.packed or size % 2 == 0]
        if self.packed and inputs % 2:
            raise ConfigError(
                f"{name} stores two values in a byte, and the contracted dimension has {inputs}, "
                "an odd number: leave this layer out, or give it an 8-bit format"
            )
        if self.only:
            sizes = [size for size in sizes if size == self.group]
            group_size = group_size or self.group
        if group_size is None:
            return inputs if self.group is None else max(s for s in sizes if s <= self.group)
        if group_size not in sizes:
            raise ConfigError(
                f"group_size {group_size} of {name} does not divide the contracted dimension of "
                f"{inputs}; sizes that do: {', '.join(map(str, sizes)) or 'none'}"
                + ("" if sizes else f" ({name} has blocks of {self.group}): leave this layer out")
                if inputs % group_size
                else f"{name} has groups of {self.group}, no others; got group_size {group_size}"
            )
        return group_size


def divisors(n: int) -> list[int]:
    """Return all divisors in order."""
    return [size for size in range(1, n + 1) if n % size == 0]


def _absmax(x: Grouped) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude of each group [.., n, o], and the groups divided by it (zeros
    stay)."""
    largest = jnp.max(jnp.abs(x), axis=-2)
    return largest, x / jnp.where(largest == 0, 1, largest)[..., None, :]


def _scale_groups(x: Grouped, largest_code: float) -> tuple[jax.Array, jax.Array]:
    """Return scales, and groups divided by their scales, within +-`largest_code`."""
    # A multiplication by the inverse: XLA would replace a division only if it compiles both
    # together.
    scale = jnp.max(jnp.abs(x), axis=-2) * np.float32(1 / largest_code)
    y = x / jnp.where(scale == 0, 1, scale)[..., None, :]
    return scale, jnp.clip(y, -largest_code, largest_code)


def _above(x: jax.Array, bounds: np.ndarray, closed: np.ndarray | None = None) -> jax.Array:
    """Return the number of bounds below each number; a number at a `closed` bound counts the bound.
    uint8."""
    count = jnp.zeros(x.shape, jnp.uint8)
    for i, bound in enumerate(bounds.astype(np.float32)):
        above = x >= bound if closed is not None and closed[i] else x > bound
        count = count + above.astype(jnp.uint8)
    return count


def _middles(levels: tuple[float, ...]) -> np.ndarray:
    return (np.asarray(levels[1:], np.float64) + np.asarray(levels[:-1], np.float64)) / 2


def _lookup(levels: tuple[float, ...]) -> Callable[[jax.Array], jax.Array]:
    """Look up 4-bit codes by their bits, which takes half the time of a gather on a CPU."""

    def level(codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        values: list[Any] = [np.float32(value) for value in levels]
        for bit in range(4):
            is_set = (codes >> bit) & 1 == 1
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [jnp.where(is_set, odd, even) for even, odd in pairs]
        return values[0]

    return level


def nf4(x: Grouped) -> GroupCodes:
    """Return the nearest of 16 quantiles of a normal distribution, relative to the largest
    magnitude."""
    scale, y = _absmax(x)
    return GroupCodes(_above(y, _middles(NF4)), scale)


def int8(x: Grouped) -> GroupCodes:
    """Return whole numbers from -127 to 127."""
    scale, y = _scale_groups(x, 127.0)
    return GroupCodes(jnp.round(y).astype(jnp.int8), scale)


def int4(x: Grouped) -> GroupCodes:
    """Return whole numbers from 0 to 15, float16 scales, and the zero: the code of 0."""
    low, high = jnp.minimum(jnp.min(x, axis=-2), 0), jnp.maximum(jnp.max(x, axis=-2), 0)
    stored = jnp.minimum((high - low) * np.float32(1 / 15), _FLOAT16).astype(jnp.float16)
    # The barrier prevents the compiler from keeping bits that float16 does not have.
    scale = jax.lax.optimization_barrier(stored).astype(jnp.float32)
    safe = jnp.where(scale == 0, 1, scale)
    zero = jnp.clip(jnp.round(-low / safe), 0, 15)
    codes = jnp.round(x / safe[..., None, :]) + zero[..., None, :]
    return GroupCodes(jnp.clip(codes, 0, 15).astype(jnp.uint8), stored, zero.astype(jnp.uint8))


def fp8(x: Grouped) -> GroupCodes:
    """Return float8_e4m3fn numbers; the largest magnitude of a group becomes 448."""
    scale, y = _scale_groups(x, _FP8)
    return GroupCodes(y.astype(jnp.float8_e4m3fn), scale)


def _mx(x: Grouped, exponent: int) -> tuple[jax.Array, jax.Array]:
    """Return powers of two that scale the largest magnitude to `exponent`, and the scaled groups.

    `floor(log2(largest)) - exponent` (OCP Microscaling Formats 1.0, section 6.3), E8M0.
    """
    largest = jnp.max(jnp.abs(x), axis=-2)
    power = jnp.frexp(largest)[1] - 1 - exponent
    power = jnp.where(largest == 0, -127, jnp.clip(power, -127, 127))
    scale = jax.lax.bitcast_convert_type((power + 127).astype(jnp.uint8), jnp.float8_e8m0fnu)
    # `ldexp`, because the smallest scale is not a normal float32.
    return scale, jnp.ldexp(x, -power[..., None, :])


def mxfp8(x: Grouped) -> GroupCodes:
    """Return float8_e4m3fn numbers with a power of two for each block of 32."""
    scale, y = _mx(x, 8)
    return GroupCodes(jnp.clip(y, -_FP8, _FP8).astype(jnp.float8_e4m3fn), scale)


def _mxfp4(x: Grouped) -> GroupCodes:
    """Return E2M1 numbers with a power of two for each block of 32; ties round to the even
    mantissa."""
    scale, y = _mx(x, 2)
    magnitude = _above(jnp.abs(y), _middles(_E2M1), closed=np.arange(7) % 2 == 1)
    return GroupCodes(magnitude | jnp.where(y < 0, 8, 0).astype(jnp.uint8), scale)


def _number(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32)


def _float8(codes: jax.Array) -> jax.Array:
    """Convert float8_e4m3fn numbers, or their bits; XLA's conversion is slow on a CPU."""
    bits = codes
    if codes.dtype != jnp.uint8:
        bits = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    bits = bits.astype(jnp.int32)
    size = bits & 127
    normal = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    value = jnp.where(size < 8, size.astype(jnp.float32) * np.float32(2**-9), normal)
    value = jnp.where(size == 127, np.float32(np.nan), value)
    return jnp.where(bits < 128, value, -value)


#: Name -> format.
FORMATS: dict[str, StorageFormat] = {
    "nf4": StorageFormat(nf4, _lookup(NF4), packed=True, group=64),
    "int8": StorageFormat(int8, _number),
    "int4": StorageFormat(int4, _number, packed=True, group=64),
    "fp8": StorageFormat(fp8, _float8),
    "mxfp8": StorageFormat(mxfp8, _float8, group=_MX, only=True),
    "mxfp4": StorageFormat(
        _mxfp4, _lookup((*_E2M1, *(-x for x in _E2M1))), packed=True, group=_MX, only=True
    ),
}

#: Formats that also quantize activations (to 8 bits, one scale for each row and group) -> the
#: storage format of their weights.
ACTIVATIONS_TOO: dict[str, str] = {"w8a8": "int8", "w4a8": "int4"}
