"""`QArray`: a matrix stored in few bits, which multiplies as it is.

Its arrays have the rank of the matrix, so leading dimensions (layer, expert) are batch dimensions
of each, and a slice of the matrix along them is that slice of each array.

Legend: i in features, o out features, n groups along i, k values of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.quantization.formats import FORMATS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scales:
    """Scales that are quantized themselves: `codes * scale + offset` (QLoRA's double quantization).

    Attributes:
        codes: int8, the shape of the scales.
        scale: float32, one for each block across the columns: fewer columns than `codes`.
        offset: float32 [.., 1, 1], the mean of all.
    """

    codes: jax.Array
    scale: jax.Array
    offset: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scales."""
        return self.codes.shape

    def numbers(self) -> jax.Array:
        """The scales, float32."""
        codes, scale = self.codes.astype(jnp.float32), self.scale
        for axis in (-2, -1):
            if scale.shape[axis] not in (1, codes.shape[axis]):
                scale = jnp.repeat(scale, codes.shape[axis] // scale.shape[axis], axis=axis)
        return codes * scale + self.offset


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray:
    """A quantized matrix [.., i, o]: `(level(codes) - zero) * scale`.

    Attributes:
        codes: [.., i, o]; formats of 4 bits have two in a byte, [.., i / 2, o] uint8, the one with
            the even index in the lower bits.
        scale: [.., n, o], float32 or an exponent (float8_e8m0fnu), or quantized `Scales`.
        zero: what stands for 0, in units of codes: [.., n, o] or [.., 1, 1]; None = 0.
        format: key of `ed_layers.quantization.formats.FORMATS`.
        activations: whether products quantize their other side to 8 bits.
        axis: along which values are in groups, and packed: -2; -1 in the transpose.
        dtype: of the matrix that this one stands for.
    """

    codes: jax.Array
    scale: jax.Array | Scales
    zero: jax.Array | None = None
    format: str = field(default="int8", metadata={"static": True})
    activations: bool = field(default=False, metadata={"static": True})
    axis: int = field(default=-2, metadata={"static": True})
    dtype: np.dtype = field(default=np.dtype("float32"), metadata={"static": True})

    #: Whether a gradient of the matrix is wanted.
    learns = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        shape = list(self.codes.shape)
        shape[self.axis] *= 2 if FORMATS[self.format].packed else 1
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
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
        """Along each dimension, into how many parts the matrix can be cut so that each is one."""
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
        """Of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def T(self) -> QArray:
        """The transpose [.., o, i], of the same bytes."""
        swapped: QArray = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, -1, -2), self)
        return replace(swapped, axis=-3 - self.axis)

    @property
    def factors_out(self) -> bool:
        """Whether a product can be scaled after it, column by column."""
        return self.axis == -2 and self.groups == 1 and self.zero is None

    def scales(self) -> jax.Array:
        """The scales, float32."""
        return self.scale.numbers() if isinstance(self.scale, Scales) else _f32(self.scale)

    def levels(self) -> jax.Array:
        """What the codes stand for before zero and scale, float32 [.., i, o]."""
        form = FORMATS[self.format]
        return form.level(unpack(self.codes, self.axis) if form.packed else self.codes)

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """The matrix as a plain array, in `dtype`; default: that of the matrix."""
        levels = self.levels()
        at = levels.ndim + self.axis
        shape = levels.shape
        grouped = levels.reshape(*shape[:at], self.groups, -1, *shape[at + 1 :])
        if self.zero is not None:
            grouped = grouped - jnp.expand_dims(_f32(self.zero), self.axis)
        values = grouped * jnp.expand_dims(self.scales(), self.axis)
        return values.reshape(shape).astype(self.dtype if dtype is None else dtype)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """As `dense`: so that what reads a plain matrix reads this one."""
        return self.dense(dtype)

    def take(self, rows: Int[Array, "*rows"]) -> Float[Array, "*rows o"]:
        """Rows of a matrix that is grouped along its columns; no other row is decoded."""
        assert self.axis == -1, "rows of a matrix that is grouped along them are not apart"
        count = self.shape[-2]

        def of(leaf: jax.Array) -> jax.Array:
            # Scales of scales have a row for a block of rows, offsets one for all.
            return jnp.take(leaf, rows // (count // leaf.shape[-2]), axis=-2)

        return jax.tree.map(of, self).dense()

    def product(self, x: Float[Array, "*rows i"], *, precision: Any = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`; it has a gradient in `x` alone."""
        return _product(precision, x, self)

    def grouped_product(
        self, rows: Float[Array, "r i"], counts: Int[Array, " e"], *, precision: Any = None
    ) -> Float[Array, "r o"]:
        """As `jax.lax.ragged_dot` of a stack [e, i, o], with a gradient in the rows alone."""
        return _grouped(precision, rows, self, counts)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def pack(codes: Any, axis: int = -2) -> Any:
    """Put pairs of 4-bit codes along an axis into bytes; numpy stays numpy."""
    xp = np if isinstance(codes, np.ndarray) else jnp
    even, odd = (xp.take(codes, xp.arange(s, codes.shape[axis], 2), axis=axis) for s in (0, 1))
    return (even | (odd << 4)).astype(xp.uint8)


def unpack(codes: jax.Array, axis: int = -2) -> jax.Array:
    """The 4-bit codes of bytes, uint8."""
    axis = codes.ndim + axis
    both = jnp.stack([codes & 15, codes >> 4], axis=axis + 1)
    return both.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])


def rounded(x: Float[Array, "*rows i"], groups: int) -> tuple[jax.Array, jax.Array]:
    """Activations in 8 bits: whole numbers [*rows, n, k], and a scale for each row and group."""
    grouped = _f32(x).reshape(*x.shape[:-1], groups, -1)
    scale = jnp.max(jnp.abs(grouped), axis=-1) * np.float32(1 / 127)
    return jnp.round(grouped / jnp.where(scale == 0, 1, scale)[..., None]), scale


def _whole_product(x: Float[Array, "*rows i"], w: QArray) -> Float[Array, "*rows o"]:
    """The product of whole numbers: of 8 bits by 8 bits, summed in 32, group by group."""
    assert w.axis == -2, "groups of a product lie along the contracted dimension"
    numbers, of_row = rounded(x, w.groups)
    codes = w.levels().reshape(w.groups, -1, w.shape[-1])
    if w.zero is not None:
        codes = codes - _f32(w.zero)[:, None]

    def add(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        a, b, row, column = group
        y = jnp.matmul(a.astype(jnp.int8), b.astype(jnp.int8), preferred_element_type=jnp.int32)
        return total + _f32(y) * row[..., None] * column, None

    parts = jnp.moveaxis(numbers, -2, 0), codes, jnp.moveaxis(of_row, -1, 0), w.scales()
    total = jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32)
    if w.groups == 1:
        return add(total, tuple(part[0] for part in parts))[0].astype(x.dtype)
    return jax.lax.scan(add, total, parts)[0].astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: Any, x: jax.Array, w: QArray) -> jax.Array:
    if w.activations:
        return _whole_product(x, w)
    if w.factors_out:
        y = jnp.matmul(x, w.levels().astype(x.dtype), precision=precision)
        return (y * w.scales()[..., 0, :]).astype(x.dtype)
    return jnp.matmul(x, w.dense(x.dtype), precision=precision)


def _product_forward(precision: Any, x: jax.Array, w: QArray) -> tuple[jax.Array, QArray]:
    # Codes are kept for the backward pass, never the matrix.
    return _product(precision, x, w), w


def _product_backward(precision: Any, w: QArray, g: jax.Array) -> tuple[jax.Array, None]:
    return jnp.matmul(g, w.dense(g.dtype).mT, precision=precision), None


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(precision: Any, rows: jax.Array, w: QArray, counts: jax.Array) -> jax.Array:
    if w.activations:
        numbers, scale = rounded(rows, w.groups)
        rows = (numbers * scale[..., None]).reshape(rows.shape).astype(rows.dtype)
    if not w.factors_out:
        return jax.lax.ragged_dot(rows, w.dense(rows.dtype), counts, precision=precision)
    y = jax.lax.ragged_dot(rows, w.levels().astype(rows.dtype), counts, precision=precision)
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows.shape[0]), side="right")
    return (y * w.scales()[jnp.minimum(expert, w.shape[0] - 1), 0]).astype(rows.dtype)


def _grouped_forward(precision: Any, rows: jax.Array, w: QArray, counts: jax.Array):
    return _grouped(precision, rows, w, counts), (w, counts)


def _grouped_backward(precision: Any, kept: tuple[QArray, jax.Array], g: jax.Array):
    w, counts = kept
    back = jax.lax.ragged_dot(g, w.dense(g.dtype).mT, counts, precision=precision)
    return back, None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)
