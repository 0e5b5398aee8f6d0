"""The stored arrays of a quantized matrix, and their values.

The arrays have the rank of the matrix. Leading dimensions (layer, expert) are batch dimensions of
each array, so a slice of the matrix along them is the same slice of each array.

Legend: i in features, o out features, n groups along i, k values of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.projections.matmul import gather_rows
from ed_layers.quantization.formats import FORMATS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scales:
    """Quantized scales: `codes * scale + offset` (QLoRA's double quantization).

    Attributes:
        codes: int8, the shape of the scales.
        scale: float32, one for each block across the columns: fewer columns than `codes`.
        offset: float32 [.., 1, 1], the mean of all scales.
    """

    codes: jax.Array
    scale: jax.Array
    offset: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scales."""
        return self.codes.shape

    def numbers(self) -> jax.Array:
        """Return the scales, float32."""
        codes, scale = self.codes.astype(jnp.float32), self.scale
        for axis in (-2, -1):
            if scale.shape[axis] not in (1, codes.shape[axis]):
                scale = jnp.repeat(scale, codes.shape[axis] // scale.shape[axis], axis=axis)
        return codes * scale + self.offset


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stored:
    """A quantized matrix [.., i, o]: `(level(codes) - zero) * scale`.

    Attributes:
        codes: [.., i, o]; two 4-bit codes share a byte, [.., i / 2, o] uint8, with the even index
            in the lower bits.
        scale: [.., n, o], float32, float16 or an exponent (float8_e8m0fnu), or quantized `Scales`.
        zero: the code of 0: [.., n, o] or [.., 1, 1]; None = 0.
        format: key of `ed_layers.quantization.formats.FORMATS`.
        activations: whether products quantize their other operand to 8 bits.
        axis: axis of the groups and of packing: -2; -1 in the transpose.
        dtype: dtype of the original matrix.
    """

    codes: jax.Array
    scale: jax.Array | Scales
    zero: jax.Array | None = None
    format: str = field(default="int8", metadata={"static": True})
    activations: bool = field(default=False, metadata={"static": True})
    axis: int = field(default=-2, metadata={"static": True})
    dtype: np.dtype = field(default=np.dtype("float32"), metadata={"static": True})

    #: Whether the matrix has a gradient.
    learns = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        shape = list(self.codes.shape)
        shape[self.axis] *= FORMATS[self.format].in_byte
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return len(self.codes.shape)

    @property
    def groups(self) -> int:
        """n."""
        return self.scale.shape[self.axis]

    @property
    def group_size(self) -> int:
        """k."""
        return self.shape[self.axis] // self.groups

    @property
    def pieces(self) -> tuple[int, ...]:
        """For each dimension, the number of equal parts into which all arrays can be split."""
        codes = list(self.codes.shape)
        if self.groups > 1 or self.activations:
            codes[self.axis] = math.gcd(codes[self.axis], self.groups)
        if (
            isinstance(self.scale, Scales)
            and (blocks := self.scale.scale.shape[-3 - self.axis]) > 1
        ):
            codes[-3 - self.axis] = blocks
        return tuple(codes)

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def transpose(self) -> Self:
        """The transpose [.., o, i]; each array is transposed."""
        swapped: Self = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, -1, -2), self)
        return replace(swapped, axis=-3 - self.axis)

    def scales(self) -> jax.Array:
        """Return the scales, float32."""
        return self.scale.numbers() if isinstance(self.scale, Scales) else _f32(self.scale)

    def halves(self) -> tuple[jax.Array, ...]:
        """Return the codes; for 4 bits, the codes with even index along the groups, and those with
        odd index.

        Two products of halves are faster than interleaving the halves.
        """
        if not FORMATS[self.format].packed:
            return (self.codes,)
        codes = self.codes.astype(jnp.int32)
        return codes & 15, codes >> 4

    def levels(self, codes: jax.Array) -> jax.Array:
        """Return the levels of the codes, before the scale, float32."""
        levels = FORMATS[self.format].level(codes)
        if self.zero is None:
            return levels
        zero = self._spread(self.zero)
        return self._by_group(levels, lambda level: level - zero)

    def values(self, codes: jax.Array) -> jax.Array:
        """Return the values of the codes, float32."""
        scale = self._spread(self.scales())
        return self._by_group(self.levels(codes), lambda level: level * scale)

    def _by_group(self, x: jax.Array, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Apply a function to [.., n, k, o] (for a transpose [.., o, n, k])."""
        at = x.ndim + self.axis
        grouped = x.reshape(*x.shape[:at], self.groups, -1, *x.shape[at + 1 :])
        return of(grouped).reshape(x.shape)

    def _spread(self, group_values: jax.Array) -> jax.Array:
        return jnp.expand_dims(_f32(group_values), self.axis)

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the matrix as a plain array in `dtype`; default: the dtype of the original
        matrix."""
        values = [self.values(codes) for codes in self.halves()]
        return interleave_halves(values, self.axis).astype(self.dtype if dtype is None else dtype)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return `dense(dtype)`, so that code for plain matrices also accepts this matrix."""
        return self.dense(dtype)

    def take(self, rows: Int[Array, "*rows"]) -> Float[Array, "*rows o"]:
        """Return rows of a matrix whose groups run along its columns; no other row is decoded."""
        assert self.axis == -1, "rows of a matrix that is grouped along them are not apart"
        count = self.shape[-2]

        def of(leaf: jax.Array) -> jax.Array:
            # Quantized scales have one scale for a block of rows, and one offset for all rows.
            return gather_rows(leaf, rows // (count // leaf.shape[-2]), axis=-2)

        return jax.tree.map(of, self).dense()


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def pack(codes: np.ndarray | jax.Array, axis: int = -2) -> Any:
    """Pack pairs of 4-bit codes along an axis into bytes; numpy arrays stay numpy arrays."""
    xp = np if isinstance(codes, np.ndarray) else jnp
    even, odd = (xp.take(codes, xp.arange(s, codes.shape[axis], 2), axis=axis) for s in (0, 1))
    return (even | (odd << 4)).astype(xp.uint8)


def unpack(codes: jax.Array, axis: int = -2) -> jax.Array:
    """Unpack the 4-bit codes of bytes, uint8."""
    return interleave_halves([codes & 15, codes >> 4], axis)


def interleave_halves(halves: Sequence[jax.Array], axis: int) -> jax.Array:
    """Interleave the entries with even and with odd index; a single array is returned unchanged."""
    if len(halves) == 1:
        return halves[0]
    first = halves[0]
    at = first.ndim + axis
    return jnp.stack(halves, at + 1).reshape(*first.shape[:at], -1, *first.shape[at + 1 :])
