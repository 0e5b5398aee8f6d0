"""`CodePanels`: a quantized matrix in the order in which the native library reads it, and
`TablePanels`: an embedding whose tied head is such a matrix.

The library multiplies four codes along the inputs by one instruction. Codes of a plain layout are
brought into fours of bytes for every product.

Legend: i in features, o out features, n groups along i, p panels, r rows, v vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from ed_layers import native
from ed_layers.native.products import (
    LEAST_SIZE,
    PANEL,
    CodePanelFormat,
    Epilogue,
    takes_panels,
)
from ed_layers.projections.panels import InPanels
from ed_layers.quantization.formats import FORMATS
from ed_layers.quantization.qarray import QArray, to_native_matrix
from ed_layers.quantization.stored import Scales

#: Dtypes of scales and of zeros by their size in bytes.
SCALES = {4: np.dtype("float32"), 2: np.dtype("float16")}
ZEROS = {4: np.dtype("float32"), 1: np.dtype("uint8")}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodePanels(InPanels):
    """A quantized matrix [i, o] whose products round their other operand to 8 bits (`w8a8`,
    `w4a8`).

    Attributes:
        groups: bytes [p, n, b]; panel k contains the columns from `k * PANEL` on. See
            `CodePanelFormat` for the bytes of a group.
        form: how a group is stored.
        dtype: dtype of the original matrix.
    """

    groups: UInt8[Array, "p n b"]
    form: CodePanelFormat = field(metadata={"static": True})
    dtype: np.dtype = field(default=np.dtype("float32"), metadata={"static": True})

    @classmethod
    def of(cls, w: QArray) -> CodePanels:
        """Copy a quantized matrix; see `can_be`."""
        codes, scale, zero, _ = to_native_matrix(w)
        n = scale.shape[0]
        fours = codes.reshape(n, -1, 4, codes.shape[1] // PANEL, PANEL)
        parts = [_in_panels(scale), *([] if zero is None else [_in_panels(zero)])]
        parts.append(_bytes(jnp.transpose(fours, (3, 0, 1, 4, 2))))
        bits = 8 // FORMATS[w.format].in_byte
        form = CodePanelFormat(
            bits, scale.dtype.itemsize, 0 if zero is None else zero.dtype.itemsize
        )
        return cls(jnp.concatenate(parts, axis=-1), form, w.dtype)

    @staticmethod
    def can_be(w: QArray) -> bool:
        """Return whether panels can contain a matrix, and are faster."""
        fours = 4 * FORMATS[w.format].in_byte  # inputs of four bytes
        fits_panels = w.ndim == 2 and w.shape[1] % PANEL == 0 and w.group_size % fours == 0
        coded = w.format in ("int8", "int4") and w.activations and w.axis == -2
        scaled = isinstance(w.scale, Scales) or w.scale.dtype in SCALES.values()
        return fits_panels and coded and scaled and w.codes.size >= LEAST_SIZE

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        codes = self.groups.shape[-1] // PANEL - self.form.scale_bytes - self.form.zero_bytes
        return codes * 8 // self.form.bits

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        panels, groups, _ = self.groups.shape
        return groups * self.group_size, panels * PANEL

    def unpack_panels(self) -> QArray:
        """Return the matrix in the plain layout."""
        panels, n, _ = self.groups.shape
        bits, scale_bytes, zero_bytes = self.form
        ends = np.cumsum([PANEL * scale_bytes, PANEL * zero_bytes])
        scale, zero, codes = jnp.split(self.groups, ends, axis=-1)

        def in_rows(part: jax.Array, dtype: np.dtype) -> jax.Array:
            shape = (panels, n, PANEL, dtype.itemsize)
            columns = part.reshape(shape if dtype.itemsize > 1 else shape[:-1])
            numbers = jax.lax.bitcast_convert_type(columns, dtype)
            return jnp.swapaxes(numbers, 0, 1).reshape(n, panels * PANEL)

        fours = jnp.transpose(codes.reshape(panels, n, -1, PANEL, 4), (1, 2, 4, 0, 3))
        byte_dtype = jnp.uint8 if bits == 4 else jnp.int8
        return QArray(
            jax.lax.bitcast_convert_type(fours, byte_dtype).reshape(-1, panels * PANEL),
            in_rows(scale, SCALES[scale_bytes]),
            in_rows(zero, ZEROS[zero_bytes]) if zero_bytes else None,
            "int4" if bits == 4 else "int8",
            activations=True,
            dtype=self.dtype,
        )

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the matrix as a plain array."""
        return self.unpack_panels().dense(dtype)

    @staticmethod
    def fit(weights: Sequence[CodePanels], rows: int, dtype: DTypeLike) -> bool:
        """See `ed_layers.projections.dot.Together`."""
        same = all(w.form == weights[0].form for w in weights)
        return same and InPanels.fit(weights, rows, dtype)

    @staticmethod
    def products(
        x: Float[Array, "n i"], weights: Sequence[CodePanels], epilogue: Epilogue
    ) -> list[jax.Array]:
        """See `ed_layers.projections.dot.Together`."""
        groups = [w.groups for w in weights]
        return native.products.products_of_code_panels(x, groups, weights[0].form, epilogue)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TablePanels:
    """A quantized table [v, d] of embeddings: an `ed_layers.projections.embed.TableRows`.

    Attributes:
        T: the matrix [d, v] of a tied head.
    """

    T: CodePanels

    @classmethod
    def of(cls, table: QArray) -> TablePanels:
        """Copy a quantized table; see `can_be`."""
        return cls(CodePanels.of(table.transpose()))

    @staticmethod
    def can_be(table: QArray) -> bool:
        """Return whether panels can contain a table."""
        turned = jax.eval_shape(QArray.transpose, table)
        return table.axis == -1 and CodePanels.can_be(turned)

    @property
    def shape(self) -> tuple[int, ...]:
        """(v, d)."""
        return self.T.shape[::-1]

    def take(self, rows: Int[Array, "*rows"]) -> Float[Array, "*rows d"]:
        """Return the rows of the given token ids."""
        matrix, at = self.T, rows.reshape(-1)
        if not takes_panels(len(at), jnp.float32):
            return matrix.unpack_panels().transpose().take(rows)
        inputs = matrix.shape[0]
        decoded_rows = native.products.take_of_code_panels(matrix.groups, matrix.form, at, inputs)
        return decoded_rows.astype(matrix.dtype).reshape(*rows.shape, inputs)


def _in_panels(columns: jax.Array) -> UInt8[Array, "p n b"]:
    """Return the bytes of [n, o] in panels."""
    parts = columns.reshape(len(columns), -1, PANEL)
    return _bytes(jnp.swapaxes(parts, 0, 1))


def _bytes(x: Shaped[Array, "p n *rest"]) -> UInt8[Array, "p n b"]:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:2], -1)
