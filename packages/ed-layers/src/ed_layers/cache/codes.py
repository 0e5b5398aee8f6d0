"""Keys and values in 8 bits: codes with float32 scales.

A scale belongs to one token and one head (or to a group of numbers of the head), so a token is
quantized once, when it is written, independently of later tokens.

Legend: b batch, g kv heads, t slots, k numbers of a head, n groups of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_infra.specs import STORED_CACHE_FORMATS, EasyDeLQuantizationConfig
from jax.typing import DTypeLike
from jaxtyping import Array, Float

logger = get_logger(__name__)

#: Format -> dtype of the codes, and the largest magnitude of a code.
_FORMATS = {
    "int8": (jnp.dtype(jnp.int8), 127.0),
    "fp8": (jnp.dtype(jnp.float8_e4m3fn), 448.0),
}
#: dtype of codes -> the largest magnitude of a code.
LARGEST_CODES = dict(_FORMATS.values())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Codes:
    """Quantized numbers; the numbers are `values * scale`.

    Attributes:
        values: codes [..., t, k], int8 or float8_e4m3fn.
        scale: float32 [..., n, t]. Slots are the last axis: accelerators would pad a last axis of
            size n to whole lanes.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the codes."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return self.values.shape


#: Stored numbers: plain or quantized.
Numbers = jax.Array | Codes


@dataclass(frozen=True)
class Format:
    """Options of a quantized cache.

    Attributes:
        name: "int8" or "fp8".
        group_size: numbers of a head that share a scale; None = all.
    """

    name: str
    group_size: int | None = None

    @classmethod
    def of(cls, config: EasyDeLQuantizationConfig | None) -> Format | None:
        """Convert a `kv_cache_quantization_config`; None stays None.

        Raises:
            ConfigError: the format is not for caches.
        """
        if config is None:
            return None
        if config.dtype not in STORED_CACHE_FORMATS:
            raise ConfigError(
                f"kv_cache_quantization_config: dtype {config.dtype!r} is not for a cache of keys "
                f"and values; choose one of the 8-bit formats: {', '.join(_FORMATS)}"
            )
        return cls(STORED_CACHE_FORMATS[config.dtype], config.group_size)

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the codes."""
        return _FORMATS[self.name][0]

    def groups(self, size: int) -> int:
        """Return the number of scales of a head of `size` numbers.

        A `group_size` that does not divide `size` is replaced by `size`, with a message.
        """
        if self.group_size is None:
            return 1
        if size % self.group_size:
            once(
                logger,
                f"kv_cache_quantization_config: group_size {self.group_size} does not divide the "
                f"{size} numbers of a head: each head of the cache has one scale (group_size "
                f"{size}). Choose a divisor of {size} for more scales",
            )
            return 1
        return size // self.group_size

    def dividing(self, *sizes: int) -> Format:
        """Return a format for heads of several sizes: one scale per head if its groups do not
        divide each size. A value can be the first numbers of a key, and has whole groups."""
        if all(self.groups(size) * (self.group_size or size) == size for size in sizes):
            return self
        return replace(self, group_size=None)

    def encode(self, x: Float[Array, "*rows t k"]) -> Codes:
        """Quantize numbers to codes [..., t, k] and scales [..., n, t]."""
        dtype, largest = _FORMATS[self.name]
        groups = self.groups(x.shape[-1])
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
        scale = jnp.max(jnp.abs(grouped), axis=-1) / largest
        codes = grouped / jnp.where(scale == 0, 1, scale)[..., None]
        if dtype == jnp.int8:
            codes = jnp.round(codes)
        return Codes(codes.reshape(x.shape).astype(dtype), jnp.swapaxes(scale, -1, -2))


def encode_numbers(x: Float[Array, "*tokens k"], like: Numbers) -> Numbers:
    """Convert numbers of single tokens to the format of the target storage.

    Returns:
        [..., k]; if quantized, codes with scales [..., n].
    """
    if not isinstance(like, Codes):
        return x.astype(like.dtype)
    name = next(name for name, (dtype, _) in _FORMATS.items() if dtype == like.dtype)
    groups = like.scale.shape[-2]
    codes = Format(name, None if groups == 1 else x.shape[-1] // groups).encode(x[..., None, :])
    return Codes(codes.values[..., 0, :], codes.scale[..., 0])


def decode_numbers(x: Numbers, dtype: DTypeLike) -> Float[Array, "*rows t k"]:
    """Return the stored numbers in `dtype`."""
    if not isinstance(x, Codes):
        return x.astype(dtype)
    groups = x.scale.shape[-2]
    scale = jnp.swapaxes(x.scale, -1, -2)[..., None]
    values = x.values.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    return (values * scale).reshape(x.shape).astype(dtype)


def first_numbers(x: Numbers, size: int) -> Numbers:
    """Return the first `size` numbers of each head; quantized groups are kept whole."""
    if not isinstance(x, Codes):
        return x[..., :size]
    groups = -(-size * x.scale.shape[-2] // x.shape[-1])
    return Codes(x.values[..., :size], x.scale[..., :groups, :])


def map_slots(function: Callable[..., jax.Array], x: Numbers, *operands: Numbers) -> Numbers:
    """Apply `function(array, *others, slot_axis)` to numbers, or to codes and scales."""
    if not isinstance(x, Codes):
        return function(x, *operands, x.ndim - 2)
    codes = [operand for operand in operands if isinstance(operand, Codes)]
    assert len(codes) == len(operands), "the other arrays must be quantized too"
    return Codes(
        function(x.values, *(o.values for o in codes), x.values.ndim - 2),
        function(x.scale, *(o.scale for o in codes), x.scale.ndim - 1),
    )
