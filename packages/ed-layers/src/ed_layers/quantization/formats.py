"""Formats of quantized weights: what a code stands for, and how numbers become codes.

A matrix [.., i, o] is cut along its contracted dimension into n groups of k values; each group of a
column shares a scale, and what a code stands for is

    (level(code) - zero) * scale

Without a zero it is `level(code) * scale`. A further format is an entry of `FORMATS`.

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

#: The 16 levels of NF4, as bitsandbytes has them (Dettmers et al. 2023, appendix E).
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
#: Values of a 4-bit number E2M1: sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8 = 448.0  # the largest float8_e4m3fn
_MX = 32  # values of a block, in every microscaling format

Grouped = Float[Array, "*lead n k o"]


class Encoded(NamedTuple):
    """What an encoder makes of groups [.., n, k, o]: codes of that shape, scales [.., n, o]."""

    codes: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None


@dataclass(frozen=True)
class Format:
    """One way to store numbers.

    Attributes:
        encode: groups to codes and scales.
        level: codes to what they stand for before zero and scale, float32.
        packed: whether two codes share a byte.
        group: values of a group where nobody says; None = all of a column.
        only: no other size of group exists.
    """

    encode: Callable[[Grouped], Encoded]
    level: Callable[[jax.Array], jax.Array]
    packed: bool = False
    group: int | None = None
    only: bool = False

    def group_of(self, inputs: int, group_size: int | None, name: str) -> int:
        """The size of a group of a dimension.

        Args:
            inputs: i.
            group_size: as configured; None = the format's own, or the largest divisor below it.
            name: of the format, for messages.

        Raises:
            ConfigError: the size does not divide the dimension, or is none of the format's.
        """
        # A group of 4-bit codes is a number of bytes.
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
    """All of them, in order."""
    return [size for size in range(1, n + 1) if n % size == 0]


def _absmax(x: Grouped) -> tuple[jax.Array, jax.Array]:
    """The largest magnitude of each group [.., n, o], and the groups over it (zeros stay)."""
    largest = jnp.max(jnp.abs(x), axis=-2)
    return largest, x / jnp.where(largest == 0, 1, largest)[..., None, :]


def _scaled(x: Grouped, largest_code: float) -> tuple[jax.Array, jax.Array]:
    """Scales, and groups over their scales, within +-`largest_code`."""
    # Not divided by it: XLA would multiply all the same, but only where it compiles both together.
    scale = jnp.max(jnp.abs(x), axis=-2) * np.float32(1 / largest_code)
    y = x / jnp.where(scale == 0, 1, scale)[..., None, :]
    return scale, jnp.clip(y, -largest_code, largest_code)


def _above(x: jax.Array, bounds: np.ndarray, closed: np.ndarray | None = None) -> jax.Array:
    """How many bounds lie below each number; at a bound that is `closed`, itself too. uint8."""
    count = jnp.zeros(x.shape, jnp.uint8)
    for i, bound in enumerate(bounds.astype(np.float32)):
        above = x >= bound if closed is not None and closed[i] else x > bound
        count = count + above.astype(jnp.uint8)
    return count


def _middles(levels: tuple[float, ...]) -> np.ndarray:
    return (np.asarray(levels[1:], np.float64) + np.asarray(levels[:-1], np.float64)) / 2


def _lookup(levels: tuple[float, ...]) -> Callable[[jax.Array], jax.Array]:
    """Look 4-bit codes up, by their bits: half the time of a gather on a CPU."""

    def level(codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        values: list[Any] = [np.float32(value) for value in levels]
        for bit in range(4):
            is_set = (codes >> bit) & 1 == 1
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [jnp.where(is_set, odd, even) for even, odd in pairs]
        return values[0]

    return level


def nf4(x: Grouped) -> Encoded:
    """The nearest of 16 quantiles of a normal distribution, over the largest magnitude."""
    scale, y = _absmax(x)
    return Encoded(_above(y, _middles(NF4)), scale)


def int8(x: Grouped) -> Encoded:
    """Whole numbers from -127 to 127."""
    scale, y = _scaled(x, 127.0)
    return Encoded(jnp.round(y).astype(jnp.int8), scale)


def int4(x: Grouped) -> Encoded:
    """Affine: whole numbers from 0 to 15, of which the zero stands for 0."""
    low, high = jnp.minimum(jnp.min(x, axis=-2), 0), jnp.maximum(jnp.max(x, axis=-2), 0)
    scale = (high - low) * np.float32(1 / 15)
    safe = jnp.where(scale == 0, 1, scale)
    zero = jnp.clip(jnp.round(-low / safe), 0, 15)
    codes = jnp.round(x / safe[..., None, :]) + zero[..., None, :]
    return Encoded(jnp.clip(codes, 0, 15).astype(jnp.uint8), scale, zero.astype(jnp.uint8))


def fp8(x: Grouped) -> Encoded:
    """float8_e4m3fn, the largest magnitude of a group at 448."""
    scale, y = _scaled(x, _FP8)
    return Encoded(y.astype(jnp.float8_e4m3fn), scale)


def _mx(x: Grouped, exponent: int) -> tuple[jax.Array, jax.Array]:
    """Powers of two by which the largest magnitude gets `exponent`, and groups over them.

    `floor(log2(largest)) - exponent` (OCP Microscaling Formats 1.0, section 6.3), E8M0.
    """
    largest = jnp.max(jnp.abs(x), axis=-2)
    power = jnp.frexp(largest)[1] - 1 - exponent
    power = jnp.where(largest == 0, -127, jnp.clip(power, -127, 127))
    scale = jax.lax.bitcast_convert_type((power + 127).astype(jnp.uint8), jnp.float8_e8m0fnu)
    # By ldexp: the smallest scale is no normal float32.
    return scale, jnp.ldexp(x, -power[..., None, :])


def mxfp8(x: Grouped) -> Encoded:
    """float8_e4m3fn with a power of two for each block of 32."""
    scale, y = _mx(x, 8)
    return Encoded(jnp.clip(y, -_FP8, _FP8).astype(jnp.float8_e4m3fn), scale)


def mxfp4(x: Grouped) -> Encoded:
    """E2M1 with a power of two for each block of 32; halfway it is the even mantissa."""
    scale, y = _mx(x, 2)
    magnitude = _above(jnp.abs(y), _middles(E2M1), closed=np.arange(7) % 2 == 1)
    return Encoded(magnitude | jnp.where(y < 0, 8, 0).astype(jnp.uint8), scale)


def _number(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32)


def _float8(codes: jax.Array) -> jax.Array:
    """Values of float8_e4m3fn, or of its bits; XLA's own conversion is slow on a CPU."""
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
FORMATS: dict[str, Format] = {
    "nf4": Format(nf4, _lookup(NF4), packed=True, group=64),
    "int8": Format(int8, _number),
    "int4": Format(int4, _number, packed=True, group=64),
    "fp8": Format(fp8, _float8),
    "mxfp8": Format(mxfp8, _float8, group=_MX, only=True),
    "mxfp4": Format(
        mxfp4, _lookup((*E2M1, *(-x for x in E2M1))), packed=True, group=_MX, only=True
    ),
}

#: Formats that quantize activations too (to 8 bits, a scale for each row and group) -> how their
#: weights are stored.
ACTIVATIONS_TOO: dict[str, str] = {"w8a8": "int8", "w4a8": "int4"}
